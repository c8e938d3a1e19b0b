"""Calls of a function that come again on the same tensors, by what they fetch."""

from __future__ import annotations

import torch

from ...ir.executable import Executable, HeldCall
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


class Calls:
    """Calls of a function on the same inputs, whose memory is written in between."""

    def __init__(self, function: str, inputs: dict[str, torch.Tensor]) -> None:
        self.function, self.inputs = function, inputs
        self._held: dict[tuple[str, ...], Call] = {}

    def fetching(self, executable: Executable, fetch: tuple[str, ...]) -> Call:
        """The call that returns these outputs."""
        call = self._held.get(fetch)
        if call is None:
            held = executable.hold(self.function, self.inputs, fetch)
            call = self._held[fetch] = Call(held)
        return call
