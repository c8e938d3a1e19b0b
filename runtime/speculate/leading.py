"""Drafting a token at a time with the target's own first layers, on memory that is made once.

A level is a few numbers written into the memory of two held calls, of the step's first parts and of
the head (see `rounds/plain.py` for why that matters).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from ...ir.execution.executable import Executable, HeldCall
from ..feeding.calls import Calls
from ..feeding.feed import Feeder
from ..feeding.outputs import Outputs
from ..feeding.step_inputs import StepInputs, memory


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
