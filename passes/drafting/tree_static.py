"""Draw drafts as the same tree every step.

Before::

    decode {
      tree = chain(depth=None)

After (nodes=4, accepted=((0.6, 0.3), (0.5, 0.4)))::

    decode {
      tree = static(paths=((0,), (1,), (0, 0), (0, 1)))

Either `paths` gives the shape, or it is the best one of `nodes` nodes for the rates at which
candidates are accepted, by depth and rank (Sequoia, Chen et al. 2024; Medusa, Cai et al. 2024).
Refuses a step that takes no ancestors, paths that are no tree, and a plan with a tree already.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from ...ir import PassError, Program
from ...ir.plan import Chain, StaticTree
from ...ir.plan.shapes import best_tree
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan

Rates = tuple[tuple[float, ...], ...]


@register
class TreeStatic(Pass):
    """paths: a node each, as ranks from the root. nodes: their number, if `accepted` is given.
    accepted: accepted[d][r] is how often the candidate of rank r at depth d + 1 is accepted."""

    paths: tuple[tuple[int, ...], ...] = ()
    nodes: int | None = Field(default=None, ge=1)
    accepted: Rates = ()

    name: ClassVar[str] = "tree_static"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"trees"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.paths) == bool(self.accepted and self.nodes):
            raise ValueError("give either paths, or nodes and accepted")
        if any(not 0 <= rate <= 1 for rates in self.accepted for rate in rates) or any(
            sum(rates) > 1 + 1e-6 for rates in self.accepted
        ):
            raise ValueError("accepted: rates of one depth lie in 0..1 and add up to at most 1")
        return self

    def run(self, program: Program) -> Outcome:
        """Put the tree into the plan. See the module docstring."""
        if program.plan.tree != Chain():
            raise PassError(f"tree_static: the plan has a tree already: {program.plan.tree.brief}")
        if self.paths:
            tree = StaticTree.of(self.paths)
        else:
            tree = best_tree(self.accepted, self.nodes or 0)
        return Outcome(with_plan(program, tree=tree), 1)
