"""Draft a chain with siblings beside it where the drafter is unsure (CaPE).

Before::

    decode {
      tree = chain(depth=None)

After (depth=5)::

    decode {
      tree = widened(depth=5, bounds=(0.3, 0.6, 0.8), counts=(7, 5, 3, 1))

At each level of the chain the drafter's probability of its best token decides how many candidates
are verified: seven where it is at most 0.3, one above 0.8 (Du et al., "GliDe with a CaPE", 2024).
Only the chain itself is predicted further, so that the drafter runs as often as for a chain. Needs
a step that takes trees (pass accept_trees). Refuses a plan that has a tree already.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ...ir import InputError, PassError, Program
from ...ir.plan import Chain, WidenedChain
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan


@register
class TreeWidened(Pass):
    """depth: of the chain. bounds: probabilities of a level's best token; counts: candidates up to
    each of them, and above all."""

    depth: int = Field(default=5, ge=1)
    bounds: tuple[float, ...] = (0.3, 0.6, 0.8)
    counts: tuple[Annotated[int, Field(ge=1)], ...] = (7, 5, 3, 1)

    name: ClassVar[str] = "tree_widened"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"trees"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the tree into the plan. See the module docstring."""
        if not isinstance(program.plan.tree, Chain):
            raise PassError(f"tree_widened: the plan has a tree already: {program.plan.tree.brief}")
        try:
            tree = WidenedChain(self.depth, self.bounds, self.counts)
        except InputError as error:
            raise PassError(f"tree_widened: {error}") from error
        return Outcome(with_plan(program, tree=tree), 1)
