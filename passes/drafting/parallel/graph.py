"""Let a drafter with a cache predict all its tokens in one call, from mask tokens.

Before (draft_model, or a layer such as draft_eagle3's)::

    func draft(tokens: i64[B,T], positions: i64[B,T], select: i64[B,S]) -> draft_logits ... {
      %e: f32[B,T,H] = aten.embedding(@draft.embed, %tokens)
    decode {
      draft = cached(function="draft", output=None, levels=5, ...)

After (masks=4)::

    weight parallel.mask: f32[1,H]
    func draft(tokens: i64[B,T], positions: i64[B,T], select: i64[B,S]) -> draft_logits ... {
      %p: bool[B,T,1] = aten.unsqueeze(aten.ge.Scalar(%tokens, V), -1)
      %k: f32[B,T,H] = aten.embedding(@draft.embed, aten.clamp(%tokens, 0, V - 1))
      %m: f32[B,T,H] = aten.embedding(@parallel.mask, aten.clamp(%tokens - V, 0))
      %e: f32[B,T,H] = aten.where.self(%p, %m, %k)
    decode {
      draft = parallel(function="draft", levels=5, token=V, weight="parallel.mask", ...)

A draft of five tokens took five calls of the function, one after the other; now the last token and
four mask tokens behind it take one, and what is said after the k-th of them is a guess for the
token k places further on (An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft
Model Adaptation", 2025). Beside mask tokens a layer on features finds one trained state,
``parallel.state`` f[1,H], in the place of the target's, which does not exist yet ("P-EAGLE:
Parallel-Drafting EAGLE with Scalable Training", 2026). The drafter must learn to read them:
`graftwork train` trains it together with the mask's embedding, and `weights` brings all of that
back. For a model that has learned it elsewhere, `token` is the id that it reads as a mask. Stands
behind the drafter. Refuses plans with another number of drafters with a cache than one, one that
drafts by other means, ids that are no token, and what `draft_ppd` refuses.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import ClassVar

import torch

from ....ir import Function, PassError, Program, type_of
from ....ir.plan import CachedDraft
from ....ir.plan.bounds import Levels, Place
from ....ir.rewrite.subgraph import tables_of
from ...engine.base import Outcome
from ...engine.plan_edits import with_plan
from ...policies import builds
from ..draft_pass import TrainedPass
from ..prompt_tokens import reading_prompts
from ..trained import TrainedWeights
from . import ParallelDraft

A = torch.ops.aten
NAME, MASK, STATE = "parallel", "parallel.mask", "parallel.state"


@builds(ParallelDraft, "levels", "rollout", "decay", "token")
class DraftParallel(TrainedPass):
    """masks: mask tokens behind the last one; one token more is drafted. token: the id of the token
    that the drafter reads as a mask already; none: a new one beyond the vocabulary. weights: a file
    of trained weights, the drafter's among them, or the folder that training wrote; empty: the
    drafter's own, and an untrained mask. The rest: see the record."""

    masks: Levels = 4
    token: Place | None = None

    name: ClassVar[str] = "draft_parallel"

    def run(self, program: Program) -> Outcome:
        """See `TrainedPass.run`; a model that reads a token of its own as a mask has learned it."""
        outcome = super().run(program)
        if self._knows(self._draft(program)):
            outcome = replace(outcome, remarks=())
        return outcome

    def insert(self, program: Program) -> Outcome:
        draft = self._draft(program)
        vocabulary = program.info.vocab_size
        if self.token is not None and self.token >= vocabulary:
            raise PassError(
                f"{self.name}: token={self.token} is no token: {program.name} has {vocabulary}"
            )
        fn = program.function(draft.function).copy()
        if self.token is None:
            mask = reading_prompts(fn, program, MASK, 1, self.name, self.weights)
            program = program.replace(weights=program.weights.adding(mask))
        made = self._tuned(self._with_state(program, fn))
        kept = [f.name for f in fields(draft) if f.name not in self.taken]
        given = {name: getattr(draft, name) for name in kept}
        given |= {"levels": 1 + self.masks, "trained": self._knows(draft)}
        own = {"token": self.token, "weight": None}
        new = {"token": vocabulary, "weight": MASK}
        parallel = self.made(**given | (new if self.token is None else own))
        plan = made.plan.draft.with_leaves(lambda leaf: parallel if leaf == draft else leaf)
        return Outcome(with_plan(made, draft=plan), 1)

    def _knows(self, draft: CachedDraft) -> bool:
        return bool(self.weights) or (self.token is not None and draft.output is None)

    def _draft(self, program: Program) -> CachedDraft:
        """The plan's one drafter with a cache, which drafts a token a call."""
        leaves = program.plan.draft.leaves
        found = [leaf for leaf in leaves if isinstance(leaf, CachedDraft)]
        if len(found) != 1 or type(found[0]) is not CachedDraft:
            raise PassError(
                f"{self.name}: expected one drafter with a cache that drafts a token a call, got "
                f"draft={program.plan.draft.brief}: put the pass behind draft_model or a layer "
                f"such as draft_eagle3"
            )
        return found[0]

    def _with_state(self, program: Program, fn: Function) -> Program:
        """The program with the function, which finds a trained state beside mask tokens."""
        graft = self.graft(program, NAME, onto=fn)
        if fn.has_input("hidden"):
            tokens, hidden = fn.input("tokens"), fn.input("hidden")
            users = list(hidden.users)
            with fn.graph.inserting_before(users[0]):
                state = graft.parameter(STATE, 1, int(str(type_of(hidden).dims[-1])), init="zeros")
                masked = self._masked(fn, tokens, program.info.vocab_size)
                masked = fn.call(A.unsqueeze.default, masked, -1)
                either = fn.call(A.where.self, masked, state, hidden)
            for user in users:
                user.replace_input_with(hidden, either)
        return graft.done(fn.outputs)

    def _masked(self, fn: Function, tokens: torch.fx.Node, vocabulary: int) -> torch.fx.Node:
        """Which tokens are masks."""
        if self.token is None:
            return fn.call(A.ge.Scalar, tokens, vocabulary)
        return fn.call(A.eq.Scalar, tokens, self.token)

    def trained(self, before: Program, after: Program) -> set[str]:
        """Those that it inserted, and the drafter's own, which learns to read masks."""
        return super().trained(before, after) | self._own(after)

    def _own(self, program: Program) -> set[str]:
        """Weights of the drafter that training changes."""
        (draft,) = (leaf for leaf in program.plan.draft.leaves if isinstance(leaf, CachedDraft))
        fns = [program.function(name) for name in (draft.function, draft.entry) if name]
        fixed = program.step.weights.union(*map(tables_of, fns))
        own = {name for fn in fns for name in fn.weights} - fixed
        return {name for name in own if program.weights[name].type.dtype.is_floating_point}

    def _tuned(self, program: Program) -> Program:
        """The program with the drafter's own weights as training left them, if there are any."""
        given = TrainedWeights(self.weights, self.name, program)
        weights = [given.of(program.weights[name]) for name in sorted(self._own(program))]
        return program.replace(weights=program.weights.replacing(*weights)) if given else program
