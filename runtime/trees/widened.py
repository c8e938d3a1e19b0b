"""A chain that is broad where the drafter is unsure.

Source: Du et al., "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding"
(2024): confidence-aware proposal expansion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir.plan import WidenedChain
from ..draft import Draft
from ..lengths.base import LengthPolicy
from ..proposers.base import Level, Proposer
from .base import TREES, TreePolicy, chosen, goes_deeper


@TREES.register(WidenedChain)
class WidenedChainPolicy(TreePolicy):
    """Only the chain is predicted further, so siblings cost the drafter nothing."""

    record: WidenedChain

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        """See `TreePolicy.grow`."""
        record, batch = self.record, len(depths)
        most = min(record.depth, proposer.depth or record.depth)
        limits = [min(depth, most) for depth in depths]
        levels: list[list[list[int]]] = []
        level = proposer.root(max(record.counts))
        none_above = np.zeros((batch, 1), dtype=np.int64)
        while True:
            levels.append(self._candidates(level))
            if not goes_deeper(length, level, len(levels), limits):
                break
            level = proposer.grow(level.tokens[:, :, 0], none_above, max(record.counts))
        return [
            _draft([level[index] for level in levels[:depth]]) for index, depth in enumerate(limits)
        ]

    def _candidates(self, level: Level) -> list[list[int]]:
        """For each sequence the candidates of a level that are worth verifying."""
        sure = np.exp(level.scores[:, 0, 0])
        # A float32 probability of the bound itself counts as not above it.
        places = np.searchsorted(self.record.bounds, sure - 1e-6, side="left")
        counts = [self.record.counts[place] for place in places.tolist()]
        rows = level.tokens[:, 0].tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _draft(levels: Sequence[Sequence[int]]) -> Draft:
    """The first candidate of each level continues the first one of the level above."""
    tokens: list[int] = []
    parents: list[int] = []
    above = -1
    for candidates in levels:
        first = len(tokens)
        tokens += candidates
        parents += [above] * len(candidates)
        above = first
    return chosen(tokens, parents)
