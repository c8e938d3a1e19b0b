"""Make all levels of a chain in one call: the draft's best token goes straight into the next level.

Before::

    func eagle(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S],
        past: i64[B], eagle.kv.1.key: f32[B,G,C,D], ...) -> hidden f32[B,T,H], draft_tokens ...
    decode {
      draft = cached(function="eagle", levels=5, ...)

After (levels=3)::

    func eagle.chain(tokens, positions, hidden, select: i64[B,1], past, eagle.kv.1.key, ...)
        -> draft_tokens i64[B,3,1], eagle.kv.1.key, ... {
      ... the body of eagle ...
      %t0: i64[B,1,1] = aten.argmax(%logits, -1, True)
      %p1: i64[B,1] = %past + %select + 1     # but within the context
      ... the body on %t0, %p1 and the state of the row %select, one token wide ...
    decode {
      draft = unrolled(draft=cached(function="eagle", levels=3, ...), chain="eagle.chain")

A draft of D tokens then costs one call instead of D, and nothing leaves the backend in between:
on a small draft the calls are what takes the time. Each level's cache rows are those of the level
before and one more; the states keep the first level's, because rows of draft tokens are forgotten
after each draft. Only the best token is looked for, so no scores are made; products of one value
are merged, which the draft's own function, being trained by its weights' names, does not do.
Refuses a plan without a drafter that has a cache, one whose tree is not a chain, and policies that
look at each level.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import Function, PassError, Program, type_of
from ...ir.plan import CachedDraft, DraftRecord, UnrolledDraft
from ...ir.plan.bounds import Rollout
from ...ir.plan.inputs import ANCESTORS
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.subgraph import inlined
from ..engine.base import Contract, Effect, Outcome, Pass, register
from ..engine.plan_edits import with_plan
from ..fusing.products import Merger

A, G = torch.ops.aten, torch.ops.graftwork


@register
class UnrollDraft(Pass):
    """levels: tokens of a draft; 0: the depth of the plan's chain, or the drafter's levels."""

    levels: Rollout = 0

    name: ClassVar[str] = "unroll_draft"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"drafts", "cached"})
    provides: ClassVar[frozenset[str]] = frozenset({"unrolled"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})
    reads: ClassVar[frozenset[Effect]] = frozenset(
        {Effect.FUNCTIONS, Effect.WEIGHT_NUMERICS, Effect.CACHE_LAYOUT, Effect.DECODE_PLAN}
    )

    def run(self, program: Program) -> Outcome:
        plan = program.plan
        if not plan.tree.chain:
            raise PassError(f"unroll_draft: expected a chain, got tree={plan.tree.brief}")
        if plan.length.by_level:
            raise PassError(
                f"unroll_draft: length={plan.length.brief} looks at each level of a draft before "
                f"the next is made, and an unrolled chain makes all at once"
            )
        made: dict[DraftRecord, DraftRecord] = {}
        for draft in plan.draft.leaves:
            if draft.unrolls and isinstance(draft, CachedDraft):
                program, made[draft] = self._unrolled(program, draft)
        if not made:
            return Outcome(program, 0, f"draft={plan.draft.brief} has no function with a cache")
        changed = plan.draft.with_leaves(lambda leaf: made.get(leaf, leaf))
        return Outcome(with_plan(program, draft=changed), len(made))

    def _unrolled(self, program: Program, draft: CachedDraft) -> tuple[Program, UnrolledDraft]:
        """The program with the chain of a drafter, and the record that uses it."""
        tree = program.plan.tree
        bounds = (draft.levels, tree.most, getattr(tree, "depth", None))
        levels = self.levels or min(bound for bound in bounds if bound is not None)
        chain = f"{draft.function}.chain"
        if chain in program.functions:
            raise PassError(f"unroll_draft: the program has a function {chain!r} already")
        context = min(program.info.context, draft.context or program.info.context)
        if levels >= context:
            raise PassError(
                f"unroll_draft: levels={levels} exceeds the context of {context} tokens"
            )
        best = Merger(_only_best(program.function(draft.function)), program.weights)
        best.merge_attention()
        best.merge_gates()
        function = unrolled(best.fn, chain, levels, context)
        record = UnrolledDraft(replace(draft, levels=levels), chain)
        return program.with_function(function, weights=best.weights), record


def unrolled(first: Function, name: str, levels: int, context: int) -> Function:
    """A function that runs `levels` levels of a draft function that returns its best token. See the
    module docstring.

    context: positions that there are. At their end a draft's rows go over earlier ones: whatever it
    then says is not fed.
    """
    states = [state for state in first.outputs if state not in ("draft_tokens", "hidden")]
    fn = Function(name, role=first.role)
    given = {node: _own_input(fn, node) for node in first.inputs}
    outputs = inlined(fn, first, given, {"S": 1})
    kept = {state: outputs[state] for state in states}
    select, past = fn.input("select"), fn.input("past")
    carried = "hidden" if "hidden" in outputs else None
    if carried:
        outputs[carried] = fn.call(G.pick_rows.default, outputs[carried], select)
    last = fn.call(A.add.Tensor, fn.call(A.unsqueeze.default, past, 1), select)
    last = fn.call(A.clamp.default, last, None, context - levels)
    later, tokens = _of_one_token(first), [_tokens(fn, outputs)]
    for level in range(1, levels):
        row = fn.call(A.add.Scalar, last, level)
        inputs = {
            "tokens": tokens[-1],
            "positions": row,
            "past": fn.call(A.squeeze.dim, row, 1),
            **{state: outputs[state] for state in states},
        }
        if carried:
            inputs[carried] = outputs[carried]
        given = {node: inputs.get(str(node.target)) for node in later.inputs}
        outputs = inlined(fn, later, given, {"T": 1, "S": 1})
        tokens.append(_tokens(fn, outputs))
    drafted = fn.call(A.unsqueeze.default, fn.call(A.cat.default, tokens, 1), -1)
    fn.set_outputs({"draft_tokens": drafted, **kept})
    sweep(fn)
    return fn


def _own_input(fn: Function, node: torch.fx.Node) -> torch.fx.Node | None:
    """The input of `fn` that stands for one of the draft's; a chain has no ancestors."""
    name, bound = str(node.target), type_of(node).bind({"S": 1})
    return None if name == ANCESTORS else fn.add_input(name, bound)


def _only_best(draft: Function) -> Function:
    """A draft function that returns its best token and states, and no scores."""
    fn = draft.copy()
    outputs = fn.outputs
    # Not every topk: experts are chosen by one, too.
    found: Any = outputs["draft_scores"].args[0]
    values = found.args[0]
    if values.target is A._log_softmax.default:  # which keeps the order
        values = values.args[0]
    with fn.graph.inserting_before(found):
        best = fn.call(A.argmax.default, values, -1, True)
    for item in [user for user in found.users if user.args[1] == 1]:
        item.replace_all_uses_with(best)
    scores = ("draft_logits", "draft_scores")
    fn.set_outputs({name: fn.outputs[name] for name in outputs if name not in scores})
    sweep(fn)
    fn.retype()
    return fn


def _of_one_token(draft: Function) -> Function:
    """The draft function for steps of one token, of which there is nothing to select."""
    fn = draft.copy()
    for node in fn.calls(G.pick_rows.default):
        if node.args[1] is fn.input("select"):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    sweep(fn)
    return fn


def _tokens(fn: Function, outputs: dict[str, torch.fx.Node]) -> torch.fx.Node:
    """The best tokens i64[B,1]."""
    return fn.call(A.squeeze.dim, outputs["draft_tokens"], -1)
