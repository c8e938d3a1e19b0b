"""The target's own first layers draft, and verification goes on where they stopped.

Source: Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding"
(2024). A drafted token's rows in the first layers' caches, and its state behind them, are those
that verification needs; `Feeder.lead` makes them and `Feeder.run` goes on from there. A `Leader`
makes them on memory that is held: see `rounds/plain.py` for why that matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from ....ir.execution.executable import Executable, HeldCall
from ...feeding.calls import Calls
from ...feeding.feed import Feeder, StepFeed
from ...feeding.outputs import Outputs
from ...feeding.step_inputs import StepInputs, memory
from ..committed import CommittedRows
from ..draft_cache import CHOSEN
from ..level import Ids, Level
from ..setting import Setting
from .base import LayersProposer
from .hidden import level_of


class Leader:
    """Runs one token of each sequence through the first parts of the step, and asks a head.

    output: of the parts, the state that the head takes as ``hidden`` [B,1,H]. wanted: what the head
    returns of it. seconds: time spent in calls so far.
    """

    def __init__(
        self,
        feeder: Feeder,
        parts: tuple[str, ...],
        output: str,
        function: str,
        wanted: tuple[str, ...],
    ) -> None:
        self.executable: Executable = feeder.executable
        self.function, self.output, self.wanted = function, output, wanted
        self.fed: StepInputs = feeder.buffers(1, parts)
        self.call = self.fed.chain.fetching(self.executable, (output,))
        self.last, self.seconds = feeder.context - 1, 0.0
        self.state: torch.Tensor | None = None
        self.ask: HeldCall = _nothing
        self.raw: dict[str, torch.Tensor] | None = None
        self.said = Outputs({})

    def enter(self, tokens: Sequence[int], rows: Sequence[int], starts: Sequence[int]) -> None:
        """Run the parts on a token of each sequence, at row `rows[b]` and position `starts[b]`."""
        fed, positions, past, last = self.fed.tokens, self.fed.positions, self.fed.past, self.last
        for index, token in enumerate(tokens):
            fed[index], past[index] = token, rows[index]
            positions[index] = min(starts[index], last)
        start = perf_counter()
        state = self.call()[self.output]
        self.seconds += perf_counter() - start
        if state is not self.state:
            self.state = state
            self.ask = self.held(state)

    def follow(self, rows: Sequence[int]) -> Outputs:
        """The head's outputs for the tokens that entered last. rows: theirs in its own cache."""
        start = perf_counter()
        raw = self.ask()
        self.seconds += perf_counter() - start
        if raw is not self.raw:
            self.raw, self.said = raw, Outputs(raw)
        return self.said

    def held(self, state: torch.Tensor) -> HeldCall:
        """The head's call on the memory of a state."""
        return self.executable.hold(self.function, {"hidden": state}, self.wanted)


class CachedLeader(Leader):
    """The same, asking a layer with a cache of its own, which makes its rows then."""

    def held(self, state: torch.Tensor) -> HeldCall:
        batch = len(state)
        fn = self.executable.program.function(self.function)
        inputs = {"hidden": state, "past": torch.zeros(batch, dtype=torch.int64)}
        inputs["positions"] = torch.zeros(batch, 1, dtype=torch.int64)
        inputs["select"] = torch.zeros(batch, 1, dtype=torch.int64)
        self.rows, self.positions = memory(inputs["past"]), memory(inputs["positions"])
        taken = {name: tensor for name, tensor in inputs.items() if fn.has_input(name)}
        return Calls((self.function,), taken).fetching(self.executable, self.wanted)

    def follow(self, rows: Sequence[int]) -> Outputs:
        for index, row in enumerate(rows):
            self.rows[index] = self.positions[index] = min(row, self.last)
        return super().follow(rows)


def _nothing() -> dict[str, torch.Tensor]:
    return {}


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
