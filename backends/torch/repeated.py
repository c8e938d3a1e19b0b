"""Calls that come again with the same input tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...ir.execution.executable import Outputs
from ..states import StateBuffers

Replayed = Callable[[], Callable[..., tuple[Outputs, Callable[[], None] | None]] | None]
"""A weak reference to what runs a step, and says how to run it again on the same tensors, if it can
be."""


class RepeatedCall:
    """A call of a function. Once it can be replayed it is, until the states have other memory or
    torch another number of threads."""

    def __init__(self, replayed: Replayed, states: StateBuffers, *call: object) -> None:
        self.replayed, self.states, self.call = replayed, states, call
        self.replay: Callable[[], None] | None = None
        self.outputs: Outputs = {}
        self.when: object = None

    def __call__(self) -> Outputs:
        """The outputs for what lies in the inputs now. Errors: as those of a run."""
        when = self.states.epoch, torch.get_num_threads()
        if self.replay is None or self.when != when:
            replayed = self.replayed()
            assert replayed is not None, "a held call is made after its executable is gone"
            self.outputs, self.replay = replayed(*self.call)
            self.when = when
        else:
            self.replay()
        return self.outputs
