"""Calls of a step that come again on the same tensors, by what they fetch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_not

import torch

from ...ir.execution.executable import Executable, HeldCall
from .outputs import Outputs


class Call:
    """A held call, whose outputs are read where they lie."""

    def __init__(self, call: HeldCall) -> None:
        self._call = call
        self._raw: dict[str, torch.Tensor] | None = None
        self._outputs = Outputs({})

    def __call__(self) -> Outputs:
        """The outputs for what lies in the inputs now."""
        raw = self._call()
        if raw is not self._raw:
            self._raw, self._outputs = raw, Outputs(raw)
        return self._outputs


class CallInTurn:
    """Held calls of several functions that make up a step, one after the other."""

    def __init__(self, calls: Sequence[HeldCall]) -> None:
        self._calls = calls
        self._raw: list[dict[str, torch.Tensor]] = []
        self._outputs = Outputs({})

    def __call__(self) -> Outputs:
        """The outputs of all, for what lies in the inputs now."""
        raw = [call() for call in self._calls]
        if len(raw) != len(self._raw) or any(map(is_not, raw, self._raw)):
            merged = {name: value for part in raw for name, value in part.items()}
            self._raw, self._outputs = raw, Outputs(merged)
        return self._outputs


class Calls:
    """Calls of a step on the same inputs, whose memory is written in between.

    functions: those that make it up, in order; each takes those of the inputs that it needs.
    """

    def __init__(self, functions: tuple[str, ...], inputs: dict[str, torch.Tensor]) -> None:
        self.functions, self.inputs = functions, inputs
        self._held: dict[tuple[str, ...], Call | CallInTurn] = {}

    def fetching(self, executable: Executable, fetch: tuple[str, ...]) -> Call | CallInTurn:
        """The call that returns these outputs."""
        call = self._held.get(fetch)
        if call is None:
            shares = list(shared_out(executable, self.functions, self.inputs, fetch))
            held = [executable.hold(*share) for share in shares]
            call = Call(held[0]) if len(held) == 1 else CallInTurn(held)
            self._held[fetch] = call
        return call


def run_in_turn(
    executable: Executable,
    functions: Sequence[str],
    inputs: Mapping[str, torch.Tensor],
    fetch: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Outputs of functions that make up a step, which is not to come again on these tensors."""
    outputs: dict[str, torch.Tensor] = {}
    for share in shared_out(executable, functions, inputs, fetch):
        outputs |= executable.run(*share)
    return outputs


def shared_out(
    executable: Executable,
    functions: Sequence[str],
    inputs: Mapping[str, torch.Tensor],
    fetch: tuple[str, ...],
) -> Iterator[tuple[str, dict[str, torch.Tensor], tuple[str, ...]]]:
    """What each function is fed and what is fetched of it, but for those that yield nothing."""
    program, alone = executable.program, len(functions) == 1
    for name in functions:
        fn = program.function(name)
        # Of one that is all there is everything is wanted: it says itself what it has not.
        wanted = fetch if alone else tuple(output for output in fetch if output in fn.outputs)
        if alone or wanted or any(output in program.states for output in fn.outputs):
            fed = {given: value for given, value in inputs.items() if fn.has_input(given)}
            yield name, fed, wanted
