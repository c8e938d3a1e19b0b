"""Calls that come again with the same input tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ...ir.execution.executable import Outputs


class Replaying(Protocol):
    """What a held call needs of an executable. epoch: changes when its states have other memory."""

    @property
    def epoch(self) -> int: ...

    def replayed(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> tuple[Outputs, Callable[[], None] | None]:
        """Run a step; its outputs, and how to run it again on the same tensors, if it can be."""


class RepeatedCall:
    """A call of a function. Once it can be replayed it is, until the states have other memory or
    torch another number of threads."""

    def __init__(
        self,
        executable: weakref.ref[Replaying],
        function: str,
        inputs: Mapping[str, torch.Tensor],
        fetch: Sequence[str],
    ) -> None:
        self.executable = executable
        self.function, self.inputs, self.fetch = function, inputs, fetch
        self.replay: Callable[[], None] | None = None
        self.outputs: Outputs = {}
        self.when: object = None

    def __call__(self) -> Outputs:
        """The outputs for what lies in the inputs now. Errors: as those of a run."""
        executable = self.executable()
        assert executable is not None, "a held call is made after its executable is gone"
        when = executable.epoch, torch.get_num_threads()
        if self.replay is None or self.when != when:
            call = self.function, self.inputs, self.fetch
            self.outputs, self.replay = executable.replayed(*call)
            self.when = when
        else:
            self.replay()
        return self.outputs
