"""A chain of the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir.plan import Chain
from ..draft import Draft
from ..lengths.base import LengthPolicy
from ..proposers.base import Ids, Proposer
from .base import TREES, TreePolicy, chosen, goes_deeper


@TREES.register(Chain)
class ChainPolicy(TreePolicy):
    """Each token is the best prediction after the one before."""

    record: Chain

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        """See `TreePolicy.grow`."""
        columns: list[Ids] = []
        most = min(self.record.depth or max(depths), proposer.depth or max(depths))
        limits = [min(depth, most) for depth in depths]
        level = proposer.root(1)
        parents = np.zeros((len(depths), 1), dtype=np.int64)
        while True:
            tokens = level.tokens[:, :, 0]
            columns.append(tokens[:, 0])
            if not goes_deeper(length, level, len(columns), limits):
                break
            level = proposer.grow(tokens, parents, 1)
        rows = np.stack(columns, 1).tolist()
        chain = range(-1, len(columns) - 1)
        return [
            chosen(row[:depth], chain[:depth], branches=False)
            for row, depth in zip(rows, limits, strict=True)
        ]
