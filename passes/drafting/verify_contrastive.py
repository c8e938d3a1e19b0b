"""Decode the target's distribution sharpened against the drafter's.

Before::

    decode {
      tree = sampled(widths=(1, 1, 1, 1), replacement=False, told=False)
      verify = lossless()

After (beta=0.5)::

    decode {
      tree = sampled(widths=(1, 1, 1, 1), replacement=False, told=True)
      verify = contrastive(beta=0.5, plausible=0.1)

Where the drafter's distribution q is known, p^(1 + beta) / q^beta is decoded instead of p, among
tokens at least `plausible` times as likely as the best one (Yuan et al., "Speculative Contrastive
Decoding", 2024). Approximate: the text is another one, and depends on the drafter; with beta=0 it
is the target's own. Refuses a plan with no tree of predictions that says what it was sampled from,
one with a drafter that copies, and one with a verifier other than the lossless default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import Contrastive, SampledTree
from ..engine.base import Contract, Effect, Outcome, Pass, register
from .plan_edits import fitting, with_plan, with_verifier


@register
class VerifyContrastive(Pass):
    """beta: how much the drafter counts. plausible: of the best token's probability, how much a
    token must have."""

    beta: float = Field(default=0.5, ge=0)
    plausible: float = Field(default=0.1, ge=0, le=1)

    name: ClassVar[str] = "verify_contrastive"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"drafts", "sampled trees"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Put the verifier into the plan. See the module docstring."""
        tree = program.plan.tree
        if not isinstance(tree, SampledTree):
            raise PassError(f"verify_contrastive: expected tree=sampled, got tree={tree.brief}")
        told = with_plan(program, tree=replace(tree, told=True))
        made = with_verifier(told, self.name, Contrastive(self.beta, self.plausible))
        return Outcome(fitting(made, self.name), 1)
