"""A chain of the likeliest tokens, or under sampling of sampled ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....ir.plan import Chain
from ...feeding.draft import NO_DRAFT, Draft
from ..lengths.base import LengthPolicy
from ..proposers.base import Proposer
from .base import TREES, TreePolicy
from .drawn import grown


@TREES.register(Chain)
class ChainPolicy(TreePolicy):
    """Each token is the best prediction after the one before, or sampled from it (see `drawn`)."""

    record: Chain

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        most = min(self.record.depth or max(depths), proposer.depth or max(depths))
        limits = [min(depth, most) for depth in depths]
        levels = list(grown(proposer, limits, length, 1, self.options))
        rows = np.concatenate([tokens for _, tokens, _ in levels], 1).tolist()
        given = [probs for _, _, probs in levels]
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
