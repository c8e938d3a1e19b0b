"""Draw drafts as trees of tokens that are sampled from the drafter's distributions.

Before::

    decode {
      tree = chain(depth=None)

After (widths=(4, 2, 1))::

    decode {
      tree = sampled(widths=(4, 2, 1), replacement=False, told=False)

Under sampling every node gets children drawn from what the drafter thinks follows it, without
replacement (Recursive Speculative Decoding, Jeon et al. 2024) or with it (SpecTr, Sun et al. 2023:
see verify_spectr); under greedy decoding it gets the likeliest ones. Needs a drafter that predicts
whole distributions. Refuses a step that takes no ancestors, and a plan with a tree already.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import Chain, SampledTree
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_plan


@register
class TreeSampled(Pass):
    """widths: children of every node, by depth. replacement: whether siblings are independent."""

    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(4, 2, 1), min_length=1)
    replacement: bool = False

    name: ClassVar[str] = "tree_sampled"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"trees"})
    provides: ClassVar[frozenset[str]] = frozenset({"sampled trees"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the tree into the plan. See the module docstring."""
        if not isinstance(program.plan.tree, Chain):
            raise PassError(f"tree_sampled: the plan has a tree already: {program.plan.tree.brief}")
        return Outcome(with_plan(program, tree=SampledTree(self.widths, self.replacement)), 1)
