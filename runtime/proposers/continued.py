"""Heads that go on where a drafter with a cache stops.

Sources: Xiao et al., "Clover: Regressive Lightweight Speculative Decoding with Sequential
Knowledge" (2024); Li et al., "Gumiho: A Hybrid Architecture to Prioritize Early Tokens in
Speculative Decoding" (2025).

The first tokens of a draft matter most, because all others hang on them, so they get the better and
slower predictor; heads predict the others from the states that it made on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...ir import UnsupportedError
from ...ir.executable import Executable
from ...ir.plan import CachedDraft, ContinuedDraft
from ..drafters.base import Fed, Taken
from ..gather import gathered
from ..options import GenerationOptions
from .base import PROPOSERS, Ids, Level, Proposer
from .cached import CachedProposer
from .hidden import HiddenProposer


@PROPOSERS.register(ContinuedDraft)
class ContinuedProposer(Proposer):
    """`first` for its levels, then `then`, once from each node of the last of them."""

    record: ContinuedDraft
    reads = True

    def __init__(
        self, record: ContinuedDraft, executable: Executable, options: GenerationOptions
    ) -> None:
        super().__init__(record, executable, options)
        then = PROPOSERS.find(record.then)(record.then, executable, options)
        if not isinstance(record.first, CachedDraft) or not isinstance(then, HiddenProposer):
            raise UnsupportedError(
                f"draft={record}: expected a drafter with a cache first and heads then"
            )
        self.first, self.then = CachedProposer(record.first, executable, options), then
        self.levels, self.depth = record.first.levels, record.levels
        self.wants = self.first.wants

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """See `Proposer.begin`."""
        self.first.begin(prompts)

    def read(self, fed: Fed) -> None:
        """See `Drafter.read`."""
        self.first.read(fed)

    def observe(self, taken: Taken) -> None:
        """See `Drafter.observe`."""
        self.first.observe(taken)

    def root(self, count: int) -> Level:
        """What the cached drafter says after the text."""
        self.place = 0
        level = self.first.root(count)
        self.lacking = level.tokens[:, 0, 0] < 0
        return level

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """What may follow each node, from the state that its parent left."""
        self.place += 1
        if self.place < self.levels:
            level = self.first.grow(tokens, parents, count)
            self.lacking |= level.tokens[:, 0, 0] < 0
            return level
        if self.place == self.levels:
            assert self.first.carried is not None  # a drafter on features makes states
            states = gathered(self.first.carried, parents)
            fed = torch.from_numpy(tokens.clip(min=0))
            level = self.then.start(fed, states, count)
        else:
            level = self.then.grow(tokens, parents, count)
        tokens = np.where(self.lacking[:, None, None], -1, level.tokens)
        return Level(tokens, level.scores, level.logits)
