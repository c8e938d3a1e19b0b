"""Let the smaller model alone answer prompts that a trained head finds easy.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    decode {
      draft = cached(function="draft", output=None, levels=16, ...)

After (threshold=0.8)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func routing(hidden: f32[B,T,H]) -> ease f32[B,T]
    decode {
      draft = cached(function="draft", output=None, levels=16, ...)
      verify = routed(function="routing", output="hidden.normed", threshold=0.8, trained=False)

A perceptron of two layers reads the target's last state of the prompt, normed, and says at what
share of the answer's tokens drafter and target will agree (Damani et al., "Learning How Hard to
Think", 2024). Above the threshold all drafts are kept: a step then costs the target as many columns
as tokens were drafted, instead of as many steps. It is trained on where the drafter is right along
texts; the drafter stays as it is. Untrained it says one half. Approximate: the text is the
drafter's where the prompt is easy. Refuses a plan without drafts, with another verifier than the
lossless default, and trees.
"""

from __future__ import annotations

import torch

from ....ir import Program
from ....ir.plan.bounds import Nodes
from ...engine.base import Outcome
from ...engine.plan_edits import with_record
from ...policies import builds
from ..draft_pass import TrainedPass
from . import Routed

A = torch.ops.aten
NAME = "routing"


@builds(Routed)
class VerifyRouted(TrainedPass):
    """inner: channels of the hidden layer. The rest: see `TrainedPass` and the record."""

    inner: Nodes = 256

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        output = graft.tap_normed()
        x = graft.linear(graft.input("hidden", graft.hidden), f"{NAME}.0", self.inner)
        x = graft.call(A.silu.default, x)
        ease = graft.call(A.squeeze.dim, graft.linear(x, f"{NAME}.head", 1, init="zeros"), -1)
        made = graft.done({"ease": ease})
        return Outcome(with_record(made, self.name, self.made(function=NAME, output=output)), 1)
