"""Draft from tables of the tokens that the target last thought likely after each context.

Before::

    decode {
      draft = none()

After (rates=((0.5, 0.2),))::

    decode {
      draft = recycling(nodes=7, depth=16, successors=8, context=3, rates=((0.5, 0.2),))

Needs the step's ``top_tokens`` (pass add_top_tokens) to learn from, and a step that takes trees
(pass accept_trees). With one token of context the tables are those of Token Recycling (Luo et al.
2024). The paper draws 80 nodes. On a CPU a node costs time, and the first few bring the most: a
step of eight columns costs little more than one of one, a step of 61 several times as much. Where
wide steps are cheap, set `nodes` to 60; the pass length_goodput finds out while decoding. Refuses
more successors than the step returns, and rates that are none.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from ...ir import PassError, Program, type_of
from ...ir.plan import RecyclingDraft
from ...ir.plan.draft import RATES
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_draft


@register
class DraftRecycling(Pass):
    """nodes, depth: of the tree, at most. successors: candidates kept a context. context: tokens
    of the longest context. rates: rates[c][r] is how often the candidate of rank r is accepted
    after c + 1 known tokens."""

    nodes: int = Field(default=7, ge=1)
    depth: int = Field(default=16, ge=1)
    successors: int = Field(default=8, ge=1)
    context: int = Field(default=3, ge=1)
    rates: tuple[tuple[float, ...], ...] = RATES

    name: ClassVar[str] = "draft_recycling"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"cached", "top_tokens", "trees"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    repeatable: ClassVar[bool] = True
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    @model_validator(mode="after")
    def _are_rates(self) -> Self:
        if not self.rates or not all(self.rates):
            raise ValueError("rates: give at least one row of rates, and at least one in each row")
        if not all(0 < rate <= 1 for row in self.rates for rate in row):
            raise ValueError("rates: every rate lies in (0, 1]")
        return self

    def run(self, program: Program) -> Outcome:
        """Put the drafter into the plan. See the module docstring."""
        given = type_of(program.step.outputs["top_tokens"]).dims[-1]
        if isinstance(given, int) and self.successors > given:
            raise PassError(
                f"draft_recycling: successors={self.successors}, but step returns {given} "
                f"top_tokens: raise add_top_tokens.count"
            )
        draft = RecyclingDraft(self.nodes, self.depth, self.successors, self.context, self.rates)
        return Outcome(with_draft(program, draft), 1)
