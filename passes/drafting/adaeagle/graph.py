"""Predict how long the next draft should be from the target's state (AdaEAGLE).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]

After (levels=8)::

    func step(tokens: i64[B,T], positions: i64[B,T])
        -> logits f32[B,T,V], hidden.normed f32[B,T,H], hidden.embedded f32[B,T,2*H]
    func length(hidden: f32[B,T,2*H]) -> length f32[B,T]
    decode {
      length = predicted(function="length", output="hidden.embedded", levels=8, trained=False)

A perceptron of three layers reads a token's embedding and the target's state of it, and says how
many tokens of the draft that follows the next token the target accepts. It is trained on what the
plan's drafter gets right. Untrained it says half of `levels`. Refuses a plan that has a length
policy.
"""

from __future__ import annotations

import torch

from ....ir import Program
from ....ir.plan.bounds import Nodes
from ...engine.base import Outcome
from ...engine.plan_edits import with_record
from ...policies import builds
from ..draft_pass import TrainedPass
from . import PredictedLength

A = torch.ops.aten
NAME = "length"


@builds(PredictedLength)
class LengthPredicted(TrainedPass):
    """inner: channels of both hidden layers. The rest: see `TrainedPass` and the record."""

    inner: Nodes = 256

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        output = graft.tap_embedded()
        x = graft.input("hidden", 2 * graft.hidden)
        for layer in range(2):
            x = graft.call(A.silu.default, graft.linear(x, f"{NAME}.{layer}", self.inner))
        said = graft.call(A.squeeze.dim, graft.linear(x, f"{NAME}.head", 1, init="zeros"), -1)
        length: PredictedLength = self.made(function=NAME, output=output)
        said = graft.call(A.add.Scalar, said, length.levels / 2)
        made = graft.done({"length": said})
        return Outcome(with_record(made, self.name, length), 1)
