"""What a depth policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir import Program
from ...ir.execution.analysis import blocks_of
from ...ir.execution.executable import Executable, fact
from ...ir.plan import FullDepth, untrained
from ..asking.text import Text
from ..feeding.feed import Feeder, StepFeed
from ..feeding.outputs import Outputs
from ..memo import Resumes
from ..registry import Registry


class DepthPolicy(Resumes):
    """Says how deep the steps of a generation go, and runs them: here through all layers.

    total: layers that there are. parts: of the step, in order, the head aside; sizes: layers of
    each. ran: layers that the last step's tokens ran through before the head. learns:
    whether a text may change what later ones run through.
    Register a subclass with ``@DEPTHS.register(ItsRecord)`` in its own file of this folder.
    """

    learns: bool = True

    def __init__(self, record: Any, executable: Executable) -> None:
        self.record, self.executable = record, executable
        program = executable.program
        layers = fact(executable, _layers)
        self.total = layers[program.step.name]
        self.ran: float = self.total
        *self.parts, self.head = program.plan.step.parts or (program.step.name, "")
        self.sizes = [layers[part] for part in self.parts]

    def begin(self, feeder: Feeder, texts: Sequence[Text]) -> None:
        """A generation of new sequences starts, whose prompts run through all layers."""
        self.feeder, self.texts = feeder, texts

    def feed(self, step: StepFeed) -> Outputs:
        """Run a step; every output has its columns."""
        return self.feeder.run(step)


def _layers(program: Program) -> dict[str, int]:
    """How many layers each function has."""
    return {name: len(blocks_of(function)) for name, function in program.functions.items()}


DEPTHS: Registry[DepthPolicy] = Registry(__package__)
DEPTHS.register(FullDepth)(DepthPolicy)


def policy_of(executable: Executable) -> DepthPolicy:
    """What carries out a plan's depth record: all layers while it is untrained. Errors:
    `UnsupportedError`."""
    record = executable.program.plan.depth
    found = DepthPolicy if untrained([record]) else DEPTHS.find(record)
    return found(record, executable)


__all__ = ["DEPTHS", "DepthPolicy", "StepFeed", "policy_of"]
