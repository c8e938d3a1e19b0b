"""Draft from a table of the tokens that the target last thought likely after each token.

Before::

    decode {
      draft = none()

After::

    decode {
      draft = recycling(successors=8)

Needs the step's ``top_tokens`` (pass add_top_tokens) to learn from, and a tree to draw (Token
Recycling, Luo et al. 2024). Refuses more successors than the step returns.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ..ir import PassError, Program, type_of
from ..ir.plan import RecyclingDraft
from .base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_draft


@register
class DraftRecycling(Pass):
    """successors: candidates kept a token."""

    successors: int = Field(default=8, ge=1)

    name: ClassVar[str] = "draft_recycling"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"cached", "top_tokens"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the drafter into the plan. See the module docstring."""
        given = type_of(program.function("step").outputs["top_tokens"]).dims[-1]
        if isinstance(given, int) and self.successors > given:
            raise PassError(
                f"draft_recycling: successors={self.successors}, but step returns {given} "
                f"top_tokens: raise add_top_tokens.count"
            )
        return Outcome(with_draft(program, RecyclingDraft(self.successors)), 1)
