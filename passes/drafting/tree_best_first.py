"""Draw drafts as the likeliest nodes of each step's predictions.

Before::

    decode {
      tree = chain(depth=None)

After (nodes=60, depth=5, width=10)::

    decode {
      tree = best_first(nodes=60, depth=5, width=10, gain=0.0, least=0.0)

For drafters whose scores are probabilities (EAGLE-2, Li et al. 2024). `gain` and `least` stop early
where more nodes are not worth it (OPT-Tree, Wang et al. 2025; DySpec, Xiong et al. 2024). Refuses a
step that takes no ancestors, and a plan with a tree already.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import BestFirst, Chain
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan


@register
class TreeBestFirst(Pass):
    """nodes: kept at most. depth: levels. width: nodes expanded a level, and children of each.
    gain: least that a level must add to the expected accepted tokens. least: probability."""

    nodes: int = Field(default=60, ge=1)
    depth: int = Field(default=5, ge=1)
    width: int = Field(default=10, ge=1)
    gain: float = Field(default=0.0, ge=0)
    least: float = Field(default=0.0, ge=0, le=1)

    name: ClassVar[str] = "tree_best_first"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"trees"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the tree into the plan. See the module docstring."""
        if program.plan.tree != Chain():
            raise PassError(
                f"tree_best_first: the plan has a tree already: {program.plan.tree.brief}"
            )
        tree = BestFirst(self.nodes, self.depth, self.width, self.gain, self.least)
        return Outcome(with_plan(program, tree=tree), 1)
