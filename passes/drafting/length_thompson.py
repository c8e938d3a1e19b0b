"""Draw the length of drafts from what is believed about their acceptance.

Before::

    decode {
      length = fixed()

After::

    decode {
      length = thompson(accepted=1.0, rejected=1.0, seed=0)

A Beta posterior a sequence, learned while decoding (EESD, Liu et al. 2024). Refuses a
plan with a length policy already.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import FixedLength, ThompsonLength
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan


@register
class LengthThompson(Pass):
    """accepted, rejected: the prior's counts. seed: of the draws, which change the speed alone."""

    accepted: float = Field(default=1.0, gt=0)
    rejected: float = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0)

    name: ClassVar[str] = "length_thompson"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the policy into the plan. See the module docstring."""
        if program.plan.length != FixedLength():
            raise PassError(
                f"length_thompson: the plan has a length already: {program.plan.length.brief}"
            )
        return Outcome(
            with_plan(program, length=ThompsonLength(self.accepted, self.rejected, self.seed)), 1
        )
