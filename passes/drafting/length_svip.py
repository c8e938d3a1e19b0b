"""Make drafts as long as their predictions are sure, by entropy.

Before::

    decode {
      length = fixed()

After::

    decode {
      length = svip(threshold=0.4, scale=1.0)

For drafters that predict level by level with probabilities (SVIP, Zhang et al. 2024): one that
copies has none and keeps its length. Refuses a plan with a length policy already.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import FixedLength, SvipLength
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan


@register
class LengthSvip(Pass):
    """threshold: of the bound exp(-scale * sqrt(entropy)). scale: of the entropy's root."""

    threshold: float = Field(default=0.4, ge=0, le=1)
    scale: float = Field(default=1.0, gt=0)

    name: ClassVar[str] = "length_svip"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the policy into the plan. See the module docstring."""
        if program.plan.length != FixedLength():
            raise PassError(
                f"length_svip: the plan has a length already: {program.plan.length.brief}"
            )
        return Outcome(with_plan(program, length=SvipLength(self.threshold, self.scale)), 1)
