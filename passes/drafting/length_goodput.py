"""Draft as many tokens as yield the most a second, or none, as measured while decoding.

Before::

    decode {
      length = fixed()

After::

    decode {
      length = goodput(loss=0.03)

Step times by width and acceptance by place in the draft are learned step by step, so drafts that
do not pay are given up (SmartSpec, Liu et al. 2024). Refuses a plan with a length policy already.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import FixedLength, GoodputLength
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan


@register
class LengthGoodput(Pass):
    """loss: share of plain decoding's time that finding out may cost over 128 tokens."""

    loss: float = Field(default=0.03, gt=0, lt=1)

    name: ClassVar[str] = "length_goodput"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the policy into the plan. See the module docstring."""
        if program.plan.length != FixedLength():
            raise PassError(
                f"length_goodput: the plan has a length already: {program.plan.length.brief}"
            )
        return Outcome(with_plan(program, length=GoodputLength(self.loss)), 1)
