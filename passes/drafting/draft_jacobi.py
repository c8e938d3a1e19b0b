"""Iterate a block of guesses to its fixed point, verifying it at every step.

Before::

    decode {
      draft = none()

After::

    decode {
      draft = jacobi(tokens=10)

Jacobi decoding (Santilli et al. 2023). The functions stay as they are. Needs the step's ``argmax``
(pass add_argmax), which is the next guess.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import Program
from ...ir.plan import JacobiDraft
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_draft


@register
class DraftJacobi(Pass):
    """tokens: of the block."""

    tokens: int = Field(default=10, ge=1)

    name: ClassVar[str] = "draft_jacobi"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"argmax", "cached"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the drafter into the plan. See the module docstring."""
        if "argmax" not in program.step.outputs:
            return Outcome(program, 0, "step returns no argmax: run add_argmax before")
        return Outcome(with_draft(program, JacobiDraft(self.tokens)), 1)
