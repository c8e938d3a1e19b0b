"""Draft tokens by copying: what followed an earlier occurrence of the text's suffix.

Before::

    decode {
      draft = none()

After::

    decode {
      draft = suffix(tokens=10, longest=16, shortest=2)

The functions stay as they are; only the plan changes. Each step proposes the tokens that followed
an earlier occurrence of the text's longest repeated suffix, and verifies them together (CopySpec,
Dumitru et al. 2025; prompt lookup decoding, Saxena 2023). Where there is no repeated suffix, the
next drafter of the recipe has its turn. Refuses bounds that contradict each other.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from ...ir import Program
from ...ir.plan import SuffixDraft
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_draft


@register
class DraftSuffix(Pass):
    """tokens: drafted a step at most. longest, shortest: suffix lengths that count, in tokens."""

    tokens: int = Field(default=10, ge=1)
    longest: int = Field(default=16, ge=1)
    shortest: int = Field(default=2, ge=1)

    name: ClassVar[str] = "draft_suffix"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    repeatable: ClassVar[bool] = True
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is more than longest={self.longest}")
        return self

    def run(self, program: Program) -> Outcome:
        """Put the drafter into the plan. See the module docstring."""
        draft = SuffixDraft(self.tokens, self.longest, self.shortest)
        return Outcome(with_draft(program, draft), 1)
