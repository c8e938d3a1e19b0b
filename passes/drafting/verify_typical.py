"""Accept draft tokens that the target finds typical (Medusa).

Before::

    decode {
      verify = lossless()

After (floor=0.09, share=0.3)::

    decode {
      verify = typical(floor=0.09, share=0.3)

A draft token is kept if its probability exceeds min(floor, share * exp(-entropy)): where the target
is unsure, more than its first choice will do (Cai et al., "Medusa", 2024). Approximate: the text
depends on the drafter. Refuses a plan with a verifier other than the lossless default.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import Program
from ...ir.plan import Typical
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_verifier


@register
class VerifyTypical(Pass):
    """floor: the most that is ever asked of a token's probability. share: of exp(-entropy)."""

    floor: float = Field(default=0.09, gt=0, le=1)
    share: float = Field(default=0.3, gt=0, le=1)

    name: ClassVar[str] = "verify_typical"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the verifier into the plan. See the module docstring."""
        return Outcome(with_verifier(program, self.name, Typical(self.floor, self.share)), 1)
