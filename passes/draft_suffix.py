"""Draft tokens by copying: what followed an earlier occurrence of the text's suffix.

Before::

    decode {
      draft = none()

After::

    decode {
      draft = suffix(tokens=10, longest=16, shortest=2)

The functions stay as they are; only the plan changes. Each step proposes the tokens that followed
an earlier occurrence of the text's longest repeated suffix, and verifies them together (CopySpec,
Dumitru et al. 2025; prompt lookup decoding, Saxena 2023). Refuses a plan that has a drafter, and
bounds that contradict each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ..ir import PassError, Program
from ..ir.plan import NoDraft, SuffixDraft
from .base import Contract, Effect, Outcome, Pass, register


@register
class DraftSuffix(Pass):
    """tokens: drafted a step at most. longest, shortest: suffix lengths that count, in tokens."""

    tokens: int = Field(default=10, ge=1)
    longest: int = Field(default=16, ge=1)
    shortest: int = Field(default=2, ge=1)

    name: ClassVar[str] = "draft_suffix"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})
    exclusive: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is more than longest={self.longest}")
        return self

    def run(self, program: Program) -> Outcome:
        """Put the drafter into the plan. See the module docstring."""
        if not isinstance(program.plan.draft, NoDraft):
            raise PassError(f"draft_suffix: the plan has a drafter already: {program.plan.draft}")
        draft = SuffixDraft(self.tokens, self.longest, self.shortest)
        return Outcome(program.replace(plan=replace(program.plan, draft=draft)), 1)
