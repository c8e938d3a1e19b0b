"""A chain of the likeliest tokens, or under sampling of sampled ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....ir.plan import Chain
from ...feeding.draft import NO_DRAFT, Draft
from ..lengths.base import LengthPolicy
from ..level import Ids
from ..proposers.base import Proposer
from .base import TREES, TreePolicy, goes_deeper
from .drawn import candidates, reaching


@TREES.register(Chain)
class ChainPolicy(TreePolicy):
    """Each token is the best prediction after the one before, or sampled from it (see `drawn`)."""

    record: Chain

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        columns: list[Ids] = []
        given: list[torch.Tensor | None] = []
        most = min(self.record.depth or max(depths), proposer.depth or max(depths))
        limits = [min(depth, most) for depth in depths]
        level = proposer.root(1)
        parents = np.zeros((len(depths), 1), dtype=np.int64)
        while True:
            wanted = reaching(limits, len(columns) + 1)
            tokens, probs = candidates(level, wanted, 1, self.options)
            columns.append(tokens[:, 0])
            given.append(probs)
            if not goes_deeper(length, level, len(columns), limits):
                break
            level = proposer.grow(tokens, parents, 1)
        rows = np.stack(columns, 1).tolist()
        return [
            _chain(row[:depth], given, index)
            for index, (row, depth) in enumerate(zip(rows, limits, strict=True))
        ]


def _chain(tokens: list[int], given: Sequence[torch.Tensor | None], index: int) -> Draft:
    """The draft of one sequence: its tokens up to the first that is none."""
    count = next((place for place, token in enumerate(tokens) if token < 0), len(tokens))
    if not count:
        return NO_DRAFT
    probs = [row[index] for row in given[:count] if row is not None]
    return Draft(tokens[:count], torch.stack(probs) if len(probs) == count else None)
