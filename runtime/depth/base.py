"""What a depth policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir.execution.executable import Executable
from ..asking.text import Text
from ..feeding.feed import Feeder, StepFeed
from ..feeding.outputs import Outputs
from ..memo import Resumes
from ..registry import Registry

G = torch.ops.graftwork


class DepthPolicy(Resumes):
    """Says how deep the steps of a generation go, and runs them.

    total: layers that there are. parts: of the step, in order, the head aside; sizes: layers of
    each. ran: layers that the last step's tokens ran through before the head. learns:
    whether a text may change what later ones run through.
    Register a subclass with ``@DEPTHS.register(ItsRecord)`` in its own file of this folder.
    """

    learns: bool = True

    def __init__(self, record: Any, executable: Executable) -> None:
        self.record, self.executable = record, executable
        program = executable.program
        self.total = layers_of(executable, program.step.name)
        self.ran: float = self.total
        *self.parts, self.head = program.plan.step.parts or (program.step.name, "")
        self.sizes = [layers_of(executable, part) for part in self.parts]

    def begin(self, feeder: Feeder, texts: Sequence[Text]) -> None:
        """A generation of new sequences starts, whose prompts run through all layers."""
        self.feeder, self.texts = feeder, texts

    def feed(self, step: StepFeed) -> Outputs:
        """Run a step; every output has its columns."""
        return self.feeder.run(step)


def layers_of(executable: Executable, function: str) -> int:
    """Layers that a function has: the states behind them are marked."""
    markers = executable.program.function(function).calls(G.hidden.default)
    return sum(marker.kwargs["point"] == "block" for marker in markers)


DEPTHS: Registry[DepthPolicy] = Registry(__package__)

__all__ = ["DEPTHS", "DepthPolicy", "StepFeed", "layers_of"]
