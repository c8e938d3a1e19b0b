"""Draft until a classifier of the draft's own predictions expects a rejection (DISCO).

Before::

    decode {
      draft = cached(function="draft", output=None, levels=20, ...)

After (inner=32)::

    func disco(features: f32[B,T,3]) -> odds f32[B,T]
    decode {
      draft = cached(function="draft", output=None, levels=20, ...)
      length = disco(function="disco", threshold=0.5, trained=False)

The classifier has one hidden layer. It is trained on what the draft says along a text and the
target thinks of it; the draft stays as it is. Untrained it says even odds. Refuses a plan that has
a length policy, and one in which nothing predicts level by level.
"""

from __future__ import annotations

import torch

from ....ir import Program
from ....ir.plan.bounds import Nodes
from ...engine.base import Outcome
from ...engine.plan_edits import with_record
from ...policies import builds
from ..draft_pass import TrainedPass
from . import FEATURES, DiscoLength

A = torch.ops.aten
NAME = "disco"


@builds(DiscoLength)
class LengthDisco(TrainedPass):
    """inner: channels of the hidden layer. The rest: see `TrainedPass` and the record."""

    inner: Nodes = 32

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        x = graft.linear(graft.input("features", FEATURES), f"{NAME}.0", self.inner)
        x = graft.call(A.silu.default, x)
        odds = graft.call(A.squeeze.dim, graft.linear(x, f"{NAME}.head", 1, init="zeros"), -1)
        made = graft.done({"odds": odds})
        return Outcome(with_record(made, self.name, self.made(function=NAME)), 1)
