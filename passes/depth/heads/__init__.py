"""Leave at the first exit whose own trained head is sure.

Source: Valade, "Accelerating Large Language Model Inference with Self-Supervised Early Exits"
(2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DecodePlan, Returned, record
from ....ir.plan.bounds import Filled
from ....ir.support.errors import InputError
from ....runtime.depth.base import DEPTHS
from ..confident import ConfidentDepth, ConfidentPolicy


@record
@dataclass(frozen=True)
class HeadsDepth(ConfidentDepth):
    """Leave at the first exit whose own trained head is sure (self-supervised early exits).

    heads: for each segment but the last, what makes logits of the state there, in the place of the
    target's own head. outputs: of the step, the states that they are trained on. Source: Valade,
    "Accelerating Large Language Model Inference with Self-Supervised Early Exits" (2024).
    """

    heads: Filled[tuple[str, ...]] = ("step.0.exit",)
    outputs: Filled[tuple[str, ...]] = ("hidden.0",)
    trained: Filled[bool] = False
    kind: ClassVar[str] = "heads"

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` unless there is a head at each exit."""
        yield from super().calls(plan)
        if not len(self.heads) == len(self.outputs) == len(plan.step.cuts):
            raise InputError(
                f"{self.brief} has {len(self.heads)} heads, learning of {len(self.outputs)} "
                f"outputs, and step={plan.step.brief} has {len(plan.step.cuts)} exits"
            )
        yield from ((head, {"logits": ("", "", "V")}) for head in self.heads)


@DEPTHS.register(HeadsDepth)
class HeadsPolicy(ConfidentPolicy):
    """The same, asking each exit's own head."""

    record: HeadsDepth

    def head_at(self, exit: int) -> str:
        return self.record.heads[exit]
