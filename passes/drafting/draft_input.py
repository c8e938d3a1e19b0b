"""Draft by copying the prompt from where the text stands in it: for editing.

Before::

    decode {
      draft = none()

After::

    decode {
      draft = input(tokens=20, start=0, longest=4)

Aggressive decoding (Ge et al. 2022). The functions stay as they are; only the plan changes.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import Program
from ...ir.plan import InputDraft
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_draft


@register
class DraftInput(Pass):
    """tokens: drafted a step at most. start: the prompt's token that the text is expected to begin
    with. longest: tokens that must agree, at best, to find the place again after an edit."""

    tokens: int = Field(default=20, ge=1)
    start: int = Field(default=0, ge=0)
    longest: int = Field(default=4, ge=1)

    name: ClassVar[str] = "draft_input"
    brings: ClassVar[str] = "an input text"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    repeatable: ClassVar[bool] = True
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the drafter into the plan. See the module docstring."""
        draft = InputDraft(self.tokens, self.start, self.longest)
        return Outcome(with_draft(program, draft), 1)
