"""Draft until a head on the draft's own states expects a rejection (SpecDec++).

Before::

    func draft(tokens: i64[B,T], positions: i64[B,T], select: i64[B,S])
        -> draft_logits f32[B,S,V], ...
    decode {
      draft = cached(function="draft", output=None, levels=5, ...)

After::

    func draft(tokens: i64[B,T], positions: i64[B,T], select: i64[B,S])
        -> draft_logits f32[B,S,V], ..., draft_odds f32[B,S]
    decode {
      draft = cached(function="draft", output=None, levels=5, ...)
      length = draft_acceptance(threshold=0.7, learned=("acceptance.0.linear.weight", ...), ...)

A draft is made token by token, and what makes the next one has seen the last: a few residual blocks
on the state that the draft's head reads say how likely the target is to accept the token that was
fed, those before it being accepted. The draft ends where the chance that any of them is rejected,
1 - prod P(accepted), exceeds the threshold (Huang et al., "SpecDec++: Boosting Speculative Decoding
via Adaptive Candidate Lengths", 2024). The head is trained on what the draft says and the target
thinks of it; the draft stays as it is. Untrained it says even odds. Stands behind the drafters.
Refuses a plan that has a length policy, and one in which no other model drafts.
"""

from __future__ import annotations

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, cone
from ...ir.plan import CachedDraft, DraftAcceptanceLength
from ..engine.base import Outcome
from ..engine.plan_edits import with_record
from ..policies import builds
from .draft_pass import TrainedPass

A, G = torch.ops.aten, torch.ops.graftwork
NAME = "acceptance"


@builds(DraftAcceptanceLength)
class LengthDraftAcceptance(TrainedPass):
    """layers: blocks of the head. The rest: see `TrainedPass` and the record."""

    layers: int = Field(default=3, ge=0)

    def insert(self, program: Program) -> Outcome:
        models = [
            leaf
            for leaf in program.plan.draft.leaves
            if isinstance(leaf, CachedDraft) and leaf.is_model
        ]
        if len(models) != 1:
            raise PassError(
                f"{self.name}: expected one model that drafts, whose states the head reads, got "
                f"draft={program.plan.draft.brief}: put the pass after draft_model"
            )
        made = self._grown(program, models[0])
        head = tuple(sorted(set(made.weights) - set(program.weights)))
        length = self.made(learned=head)
        return Outcome(with_record(made, self.name, length), 1)

    def _grown(self, program: Program, draft: CachedDraft) -> Program:
        """The program with the head in the draft's function."""
        fn = program.function(draft.function).copy()
        graft = self.graft(program, NAME, onto=fn)
        with fn.graph.inserting_before(fn.output_node):
            x = _state(fn, self.name)
            for layer in range(self.layers):
                x = graft.res_block(x, f"{NAME}.{layer}.linear")
            odds = graft.linear(x, f"{NAME}.head", 1, init="zeros")
            odds = graft.call(A.squeeze.dim, odds, -1)
        return graft.done({**fn.outputs, "draft_odds": odds})


def _state(fn: Function, owner: str) -> torch.fx.Node:
    """What the draft's head reads of each token: what its last product on the way to the logits
    takes. Errors: `PassError` for logits that no product makes."""
    above = cone([fn.outputs["draft_logits"]])
    products = [n for n in fn.calls(A.linear.default, G.quantized_linear.default) if n in above]
    if not products:
        raise PassError(
            f"{owner}: {fn.name} has no linear layer from hidden states to draft_logits"
        )
    state = products[-1].args[0]
    assert isinstance(state, torch.fx.Node)
    return state
