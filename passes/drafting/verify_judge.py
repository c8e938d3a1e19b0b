"""Keep rejected draft tokens that a trained head on the target's states finds acceptable.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (threshold=0.5)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func judge(hidden: f32[B,T,H]) -> judged f32[B,T,1]
    decode {
      verify = judge(function="judge", output="hidden.normed", threshold=0.5, trained=False)

The head sees the last state of a draft token, normed, and says the log odds that the token may stay
(Bachmann et al., "Judge Decoding", 2025). An untrained head says even odds, which is not more than
0.5, so nothing changes before it is trained. Approximate: the text depends on the drafter; with
threshold=1 it is the target's own. Refuses a plan with a verifier other than the lossless default.
"""

from __future__ import annotations

from ...ir import Program
from ...ir.plan import Judge
from ..engine.base import Outcome
from ..engine.plan_edits import with_record
from ..policies import builds
from .draft_pass import TrainedPass

NAME = "judge"


@builds(Judge)
class VerifyJudge(TrainedPass):
    """See `TrainedPass` and the record."""

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        output = graft.tap_normed()
        hidden = graft.input("hidden", graft.hidden)
        judged = graft.linear(hidden, NAME, 1, init="zeros")
        verify = self.made(function=NAME, output=output)
        return Outcome(with_record(graft.done({"judged": judged}), self.name, verify), 1)
