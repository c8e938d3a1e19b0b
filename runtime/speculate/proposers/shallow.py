"""The target's own first layers draft, and verification goes on where they stopped.

Source: Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding"
(2024). A drafted token's rows in the first layers' caches, and its state behind them, are those
that verification needs; `Feeder.lead` makes them and `Feeder.run` goes on from there.
"""

from __future__ import annotations

from typing import Any

import torch

from ....ir.execution.executable import HeldCall
from ...feeding.feed import StepFeed
from ..committed import CommittedRows
from ..draft_cache import CHOSEN
from ..leading import Leader
from ..level import Ids, Level
from ..setting import Setting
from .base import LayersProposer
from .hidden import level_of


class LeadingProposer(LayersProposer):
    """Feeds a chain token by token through the first segments of the step.

    committed: rows of a cache of the draft's own, if it has one.
    """

    record: Any
    leads: type[Leader] = Leader
    committed: CommittedRows | None = None

    def __init__(self, record: Any, setting: Setting) -> None:
        super().__init__(record, setting)
        program = self.executable.program
        self.parts = program.plan.step.cuts.index(record.exit) + 1
        self.fetch = tuple(program.function(record.function).outputs)
        self.chains: list[list[int]] = []
        self.state = torch.empty(0)
        self.held: HeldCall | None = None

    def leader(self, scores: bool) -> Leader:
        """What drafts a token at a time, for rounds that lead tokens themselves (`rounds.shallow`).
        scores: whether more is wanted than the best token."""
        wanted = CHOSEN if scores else ("draft_tokens",)
        parts = self.feeder.parts[: self.parts]
        return self.leads(self.feeder, parts, self.record.output, self.record.function, wanted)

    def root(self, count: int) -> Level:
        self.below = 0
        self.chains = [[] if text.done else [text.tokens[-1]] for text in self.texts]
        self.past, self.starts = self.ends()
        return self._level(count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        self.below += 1
        for chain, (token,) in zip(self.chains, tokens.tolist(), strict=True):
            if chain and token >= 0:
                chain.append(token)
        return self._level(count)

    def _level(self, count: int) -> Level:
        wanted = (self.record.output,)
        step = StepFeed(self.chains, self.past, self.starts, wanted)
        outputs = self.feeder.lead(self.parts, step)
        state = outputs[self.record.output][:, :1]
        if self.state.shape != state.shape:
            self.state, self.held = torch.empty_like(state), None
        self.state.copy_(state)
        return self.level(count)

    def level(self, count: int) -> Level:
        """What may follow the tokens whose states lie in `state`."""
        if self.held is None:
            self.held = self.executable.hold(
                self.record.function, {"hidden": self.state}, self.fetch
            )
        return level_of(self.held(), count)
