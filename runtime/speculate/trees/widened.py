"""A chain that is broad where the drafter is unsure.

Source: Du et al., "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding"
(2024): confidence-aware proposal expansion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....ir.plan import WidenedChain
from ...feeding.draft import NO_DRAFT, Draft
from ..lengths.base import LengthPolicy
from ..level import Ids, Level
from ..proposers.base import Proposer
from .base import TREES, TreePolicy
from .chain import grown


@TREES.register(WidenedChain)
class WidenedChainPolicy(TreePolicy):
    """Only the chain is predicted further: siblings cost the drafter nothing (see `chain`)."""

    record: WidenedChain

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        record = self.record
        most = min(record.depth, proposer.depth or record.depth)
        limits = [min(depth, most) for depth in depths]
        levels: list[list[list[int]]] = []
        given: list[torch.Tensor | None] = []
        count = max(record.counts)
        for level, tokens, probs in grown(self, proposer, limits, length, count):
            levels.append(self._worthwhile(level, tokens))
            given.append(probs)
        return [
            _draft([level[index] for level in levels[:depth]], given, index)
            for index, depth in enumerate(limits)
        ]

    def _worthwhile(self, level: Level, tokens: Ids) -> list[list[int]]:
        """For each sequence those of a level's candidates that are worth verifying."""
        # Of how many the drafter's distribution decides alone, not what was drawn from it.
        sure = np.exp(level.scores[:, 0, 0])
        # A float32 probability of the bound itself counts as not above it.
        places = np.searchsorted(self.record.bounds, sure - 1e-6, side="left")
        counts = [self.record.counts[place] for place in places.tolist()]
        return [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]


def _draft(
    levels: Sequence[Sequence[int]], given: Sequence[torch.Tensor | None], index: int
) -> Draft:
    """The first candidate of each level continues the first one of the level above."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[torch.Tensor] = []
    above = -1
    for place, siblings in enumerate(levels):
        known = [token for token in siblings if token >= 0]
        if not known or siblings[0] < 0:
            break
        first = len(tokens)
        tokens += known
        parents += [above] * len(known)
        row = given[place]
        probs += [] if row is None else [row[index]] * len(known)
        above = first
    if not tokens:
        return NO_DRAFT
    told = torch.stack(probs) if len(probs) == len(tokens) else None
    return Draft(tokens, told, tuple(parents))
