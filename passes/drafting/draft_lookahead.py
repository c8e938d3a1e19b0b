"""Draft n-grams that come up in a window of guesses beside the text.

Before::

    decode {
      draft = none()

After::

    decode {
      draft = lookahead(window=7, ngram=5, pool=7)

Lookahead decoding (Fu et al. 2024): guesses and n-grams to verify share a step as branches of one
tree. Needs a step that takes trees (pass accept_trees) and returns ``argmax`` (pass add_argmax).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import Program
from ...ir.plan import LookaheadDraft
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_draft


@register
class DraftLookahead(Pass):
    """window: places guessed ahead. ngram: tokens of an n-gram. pool: n-grams kept a token."""

    window: int = Field(default=7, ge=1)
    ngram: int = Field(default=5, ge=2)
    pool: int = Field(default=7, ge=1)

    name: ClassVar[str] = "draft_lookahead"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"argmax", "cached", "trees"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the drafter into the plan. See the module docstring."""
        if "argmax" not in program.step.outputs:
            return Outcome(program, 0, "step returns no argmax: run add_argmax before")
        draft = LookaheadDraft(self.window, self.ngram, self.pool)
        return Outcome(with_draft(program, draft), 1)
