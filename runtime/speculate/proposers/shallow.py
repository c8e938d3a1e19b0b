"""The target's own first layers draft, and verification goes on where they stopped.

Source: Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding"
(2024). A drafted token's rows in the first layers' caches, and its state behind them, are those
that verification needs; `Feeder.lead` makes them and `Feeder.run` goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....ir.execution.executable import HeldCall
from ...feeding.draft import VerifiedStep
from ...feeding.feed import StepFeed
from ..draft_cache import CHOSEN
from ..leading import Leader
from ..level import Ids, Level
from ..setting import Setting
from .base import Proposer
from .hidden import level_of


class LeadingProposer(Proposer):
    """Feeds a chain token by token through the first segments of the step."""

    record: Any
    leads: type[Leader] = Leader

    def __init__(self, record: Any, setting: Setting) -> None:
        super().__init__(record, setting)
        assert setting.feeder is not None, "whoever drafts with the target's layers is told of them"
        program = self.executable.program
        self.feeder, self.texts = setting.feeder, setting.texts
        self.parts = program.plan.step.cuts.index(record.exit) + 1
        self.fetch = tuple(program.function(record.function).outputs)
        self.chains: list[list[int]] = []
        self.state = torch.empty(0)
        self.held: HeldCall | None = None

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is kept of what is committed: the target's caches hold it."""

    def observe(self, taken: VerifiedStep) -> None:
        """See `begin`."""

    # -- for rounds that lead tokens themselves, and tell of it afterwards (see `rounds.shallow`)

    def leader(self, scores: bool) -> Leader:
        """What drafts a token at a time. scores: whether more is wanted than the best token."""
        wanted = CHOSEN if scores else ("draft_tokens",)
        parts = self.feeder.parts[: self.parts]
        return self.leads(self.feeder, parts, self.record.output, self.record.function, wanted)

    def settle(self) -> None:
        """Bring caches of the draft's own up to the texts."""

    def places(self, level: int) -> list[int]:
        """Rows of caches of the draft's own for tokens `level` behind the texts' last ones."""
        return []

    def advance(self, counts: Sequence[int]) -> None:
        """Each text has gained so many tokens, for all of which but the last there are rows."""

    def settled(self, tokens: Sequence[Sequence[int]]) -> None:
        """The tokens that each text has gained since `settle`."""

    # -- for general ones

    def root(self, count: int) -> Level:
        """What may follow each text's last token."""
        self.chains = [[] if text.done else [text.tokens[-1]] for text in self.texts]
        self.past = [0 if text.done else text.rows for text in self.texts]
        self.starts = [0 if text.done else text.position for text in self.texts]
        return self._level(count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """What may follow the chain's last tokens."""
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
