"""Draw drafts as chains of a number of tokens.

Before::

    decode {
      tree = chain(depth=None)

After (depth=5)::

    decode {
      tree = chain(depth=5)

For drafters that predict token by token; one that copies says itself how long its drafts are.
Refuses a plan with a tree already.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import Chain
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan


@register
class TreeChain(Pass):
    """depth: tokens of a draft at most."""

    depth: int = Field(default=5, ge=1)

    name: ClassVar[str] = "tree_chain"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the chain into the plan. See the module docstring."""
        if program.plan.tree != Chain():
            raise PassError(f"tree_chain: the plan has a tree already: {program.plan.tree.brief}")
        return Outcome(with_plan(program, tree=Chain(self.depth)), 1)
