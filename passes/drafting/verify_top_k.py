"""Accept draft tokens that are among the target's likeliest few.

Before::

    decode {
      verify = lossless()

After (count=2)::

    decode {
      verify = top_k(count=2)

Stern et al., "Blockwise Parallel Decoding" (2018). Approximate: the text depends on the drafter;
greedy decoding with count=1 stays exact. Refuses a plan with a verifier other than the lossless
default.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import Program
from ...ir.plan import TopKAccept
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_verifier


@register
class VerifyTopK(Pass):
    """count: tokens of the target that will do."""

    count: int = Field(default=2, ge=1)

    name: ClassVar[str] = "verify_top_k"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the verifier into the plan. See the module docstring."""
        return Outcome(with_verifier(program, self.name, TopKAccept(self.count)), 1)
