"""Verify independently sampled siblings together, by k-sequential selection (SpecTr).

Before::

    decode {
      tree = sampled(widths=(4, 2, 1), replacement=True, told=False)
      verify = lossless()

After::

    decode {
      tree = sampled(widths=(4, 2, 1), replacement=True, told=False)
      verify = spectr()

Lossless as recursive rejection is, and keeps more where siblings are likely to repeat each other
(Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", 2023). Says nothing new on
greedy decoding. Refuses a plan whose tree does not sample siblings independently, and one with a
verifier other than the lossless default.
"""

from __future__ import annotations

from typing import ClassVar

from ...ir import PassError, Program
from ...ir.plan import SampledTree, SpecTr
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_verifier


@register
class VerifySpecTr(Pass):
    """No options."""

    name: ClassVar[str] = "verify_spectr"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"sampled trees"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the verifier into the plan. See the module docstring."""
        tree = program.plan.tree
        if not isinstance(tree, SampledTree) or not tree.replacement:
            raise PassError(
                f"verify_spectr: expected a tree of independently sampled siblings, got "
                f"tree={tree.brief}: run tree_sampled with replacement: true"
            )
        return Outcome(with_verifier(program, self.name, SpecTr()), 1)
