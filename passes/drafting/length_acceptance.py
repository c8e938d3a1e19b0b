"""Draft until a trained head on the target's state expects a rejection.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (levels=8, threshold=0.7)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func acceptance(hidden: f32[B,T,H]) -> accepted f32[B,T,8]
    decode {
      length = acceptance(function="acceptance", output="hidden.normed", levels=8, ...)

For each level the head says the log odds that the target accepts the draft's token there; the
draft ends where the chance of a rejection so far exceeds the threshold. That is the rule of
SpecDec++ (Huang et al., 2024), whose head reads the draft's states (`length_draft_acceptance`): one
on the target's state is asked once a step, whatever drafts. It is trained on what the plan's
drafter gets right. Untrained it says even odds. Refuses a plan that has a length policy.
"""

from __future__ import annotations

from pydantic import Field

from ...ir import Program
from ...ir.plan import AcceptanceLength
from ..engine.base import Outcome
from ..engine.plan_edits import with_record
from ..policies import builds
from .draft_pass import TrainedPass

NAME = "acceptance"


@builds(AcceptanceLength)
class LengthAcceptance(TrainedPass):
    """layers: blocks of the head. The rest: see `TrainedPass` and the record."""

    layers: int = Field(default=1, ge=0)

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        output = graft.tap_normed()
        x = graft.input("hidden", graft.hidden)
        for layer in range(self.layers):
            x = graft.res_block(x, f"{NAME}.{layer}.linear")
        length: AcceptanceLength = self.made(function=NAME, output=output)
        odds = graft.linear(x, f"{NAME}.head", length.levels, init="zeros")
        made = graft.done({"accepted": odds})
        return Outcome(with_record(made, self.name, length), 1)
