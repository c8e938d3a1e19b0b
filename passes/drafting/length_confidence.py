"""End drafts at the first token that the drafter holds for improbable.

Before::

    decode {
      length = fixed()

After::

    decode {
      length = confidence(threshold=0.6, depth=6)

For drafters that predict level by level with probabilities (Kangaroo, Liu et al. 2024): one that
copies has none and keeps its length. Refuses a plan with a length policy already.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import ConfidenceLength, FixedLength
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan


@register
class LengthConfidence(Pass):
    """threshold: least probability to go on with. depth: levels at most."""

    threshold: float = Field(default=0.6, gt=0, le=1)
    depth: int = Field(default=6, ge=1)

    name: ClassVar[str] = "length_confidence"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the policy into the plan. See the module docstring."""
        if program.plan.length != FixedLength():
            raise PassError(
                f"length_confidence: the plan has a length already: {program.plan.length.brief}"
            )
        return Outcome(with_plan(program, length=ConfidenceLength(self.threshold, self.depth)), 1)
