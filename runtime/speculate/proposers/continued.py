"""Heads that go on where a drafter with a cache stops.

Sources: Xiao et al., "Clover-2: Accurate Inference for Regressive Lightweight Speculative
Decoding" (2024); Li et al., "Gumiho: A Hybrid Architecture to Prioritize Early Tokens in
Speculative Decoding" (2025).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from ....ir import UnsupportedError
from ....ir.plan import ContinuedDraft
from ....ir.plan.continued import TwofoldDraft
from ...feeding.gather import gathered
from ..level import Ids, Level
from ..setting import Setting
from .base import PROPOSERS, Proposer
from .cached import CachedProposer
from .hidden import HiddenProposer


class _Path:
    """Paths to M nodes, S levels down: tokens i64[B,M,S], and their states [B,M,S,H]."""

    def __init__(self, batch: int) -> None:
        self.tokens = torch.empty(batch, 1, 0, dtype=torch.int64)
        self.states = torch.empty(batch, 1, 0, 0)

    def add(self, tokens: Ids, parents: Ids, carried: torch.Tensor) -> None:
        """A level below the last one: its tokens, whom they follow, and its parents' states."""
        new = torch.from_numpy(tokens.clip(min=0))[:, :, None]
        states = gathered(carried, parents)[:, :, None]
        if not self.tokens.shape[2]:
            self.tokens, self.states = new, states
            return
        self.tokens = torch.cat([gathered(self.tokens, parents), new], 2)
        self.states = torch.cat([gathered(self.states, parents), states], 2)


@PROPOSERS.register(ContinuedDraft)
class ContinuedProposer(Proposer):
    """`first` for its levels, then `then` from each node of the last of them. state: the output
    f[B,M,H] of the first drafter's last call that `then` starts from."""

    record: TwofoldDraft
    reads = True
    state: ClassVar[str] = "hidden"

    def __init__(self, record: TwofoldDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        then = PROPOSERS.find(record.then)(record.then, setting)
        if not isinstance(then, HiddenProposer):
            raise UnsupportedError(f"draft={record}: expected heads then, got {record.then.kind}")
        self.first = self.follower = CachedProposer(record.first, setting)
        self.then = then
        self.levels = record.first.levels
        self.wants = self.first.wants

    def root(self, count: int) -> Level:
        self.place = 0
        self.path = _Path(len(self.first.committed.texts))
        level = self.first.root(count)
        self.lacking = level.tokens[:, 0, 0] < 0
        return level

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        self.place += 1
        if self.place <= self.levels:
            self.path.add(tokens, parents, self.first.made[self.state])
        if self.place < self.levels:
            level = self.first.grow(tokens, parents, count)
            self.lacking |= level.tokens[:, 0, 0] < 0
            return level
        if self.place == self.levels:
            fed, states = self.path.tokens, self.path.states
            if not self.record.then.whole_path:
                fed, states = fed[:, :, -1], states[:, :, -1]
            level = self.then.start(fed, states, count)
        else:
            level = self.then.grow(tokens, parents, count)
        tokens = np.where(self.lacking[:, None, None], -1, level.tokens)
        return Level(tokens, level.scores, level.logits)
