"""Verify a chain and draft the next one in the same call as the step.

Before::

    func step(tokens: i64[B,T], positions, past, select: i64[B,S], ...)
        -> logits f32[B,S,V], argmax i64[B,S], hidden.normed f32[B,T,H], ...
    func eagle.chain(tokens, positions, hidden, select, past, ...) -> draft_tokens i64[B,3,1], ...
    decode {
      draft = unrolled(draft=cached(function="eagle", levels=3, ...), chain="eagle.chain")

After::

    func step.drafting(tokens, positions, past, select, ..., eagle.kv.1.key, ...)
        -> logits, argmax, hidden.normed, ..., drafted i64[B,4], ... {
      ... the body of step ...
      %place: i64[B,1] = ...    # the last of the chosen tokens up to which the argmax agrees
      %next: i64[B,T] = ...     # the token after each: its successor, at `place` the argmax
      ... the body of eagle.chain on %next, the features and %place ...
      %drafted: i64[B,4] = aten.cat([%place, %draft_tokens], 1)
    decode {
      step = fused(function="step.drafting", plain="step", spare=2)
      draft = fused(draft=unrolled(draft=cached(function="eagle", ...), chain="eagle.chain"))

Greedy verification is a comparison and the text's features are there: so a round of speculation is
one call, in which draft and target share their threads, and the loop only reads numbers. Rows of
the draft's cache stand beside those of the step's, position by position. Where something else
decides than the argmax (sampling, penalties), the chain is a call of its own. Where a length policy
gives drafts up, steps without drafts are those of the plain step, and the chain of its own makes
what the draft's cache lacks then; over caches whose rows have no places of their own (evicted,
shared) no draft is given up. Refuses a plan without an unrolled drafter on the step's features.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import Function, PassError, Program, type_of
from ...ir.plan import Fused, FusedDraft, UnrolledDraft, Whole
from ...ir.rewrite.subgraph import inlined
from ..engine.base import Contract, Effect, Outcome, Pass, register
from ..engine.plan_edits import fitting, with_plan

A, G = torch.ops.aten, torch.ops.graftwork

NAME = "step.drafting"


@register
class FuseDraft(Pass):
    """No options."""

    name: ClassVar[str] = "fuse_draft"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"unrolled", "argmax", "picked"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})
    reads: ClassVar[frozenset[Effect]] = frozenset(
        {
            Effect.FUNCTIONS,
            Effect.WEIGHT_NUMERICS,
            Effect.CACHE_LAYOUT,
            Effect.LOGITS,
            Effect.DECODE_PLAN,
        }
    )

    def run(self, program: Program) -> Outcome:
        leaves = [leaf for leaf in program.plan.draft.leaves if leaf.reads and not leaf.in_step]
        found = [leaf.unrolled for leaf in leaves if leaf.unrolled is not None]
        if not found:
            return Outcome(
                program, 0, f"draft={program.plan.draft.brief} is no unrolled drafter on features"
            )
        if len(found) > 1:
            raise PassError("fuse_draft: the plan has several unrolled drafters; a step makes one")
        if NAME in program.functions:
            raise PassError(f"fuse_draft: the program has a function {NAME!r} already")
        if program.plan.step != Whole(program.step.name):
            raise PassError(
                f"fuse_draft: expected a plan whose step is one function, got "
                f"step={program.plan.step.brief}: leave out the pass that cuts or changes it, "
                f"or set its prefill='same' (skip_layers, read_sparse, read_chunks)"
            )
        step, fused = Fused(NAME, program.step.name, found[0].levels - 1), FusedDraft(found[0])
        draft = program.plan.draft.with_leaves(lambda leaf: fused if leaf == found[0] else leaf)
        planned = fitting(with_plan(program, step=step, draft=draft), self.name)
        return Outcome(planned.with_function(drafting_step(program, found[0])), 1)


def drafting_step(program: Program, unrolled: UnrolledDraft) -> Function:
    """The step that also makes the next draft. See the module docstring."""
    fn = program.step.copy()
    fn.name = NAME
    outputs = fn.outputs
    chain, draft = program.function(unrolled.chain), unrolled.draft
    inputs: dict[str, Any] = {}
    for node in chain.inputs:
        name = str(node.target)
        known = name in ("tokens", "hidden", "select") or fn.has_input(name)
        inputs[name] = None if known else fn.add_input(name, type_of(node))
    with fn.graph.inserting_before(fn.output_node):
        place, following = _verified(fn, outputs["argmax"])
        hidden = outputs[str(draft.output)]
        if draft.entry is not None:
            entry = program.function(draft.entry)
            hidden = inlined(fn, entry, {entry.input("hidden"): hidden}, {})["hidden"]
        inputs.update(tokens=following, hidden=hidden, select=place)
        given = {
            node: inputs[str(node.target)] or fn.input(str(node.target)) for node in chain.inputs
        }
        made = inlined(fn, chain, given, {})
        tokens = fn.call(A.squeeze.dim, made.pop("draft_tokens"), -1)
        drafted = fn.call(A.cat.default, [place, tokens], 1)
    states = {n: v for n, v in outputs.items() if n in program.states}
    plain = {n: v for n, v in outputs.items() if n not in states}
    fn.set_outputs({**plain, "drafted": drafted, **states, **made})
    return fn


def _verified(fn: Function, argmax: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    """(place i64[B,1], following i64[B,T]): the token of the step up to which the text goes, and
    the token after each one up to there.

    Behind a row's own tokens there is anything; should it agree with the argmax, `place` is wrong,
    and the drafter, which knows where the row ends, drops the draft.
    """
    tokens, select = fn.input("tokens"), fn.input("select")
    batch = type_of(tokens).dims[0]
    nothing = fn.call(A.full.default, [batch, 1], -1, dtype=torch.int64)
    padded = fn.call(A.cat.default, [tokens, nothing], 1)
    after = fn.call(A.slice.Tensor, padded, 1, 1, 2**63 - 1)
    said = fn.call(A.gather.default, after, 1, select)
    differs = fn.call(A._to_copy.default, fn.call(A.ne.Tensor, said, argmax), dtype=torch.float32)
    agreed = fn.call(A.argmax.default, differs, 1, True)  # the first of the largest
    place = fn.call(A.gather.default, select, 1, agreed)
    best = fn.call(A.gather.default, argmax, 1, agreed)
    columns = fn.call(A.arange.start_step, 0, type_of(tokens).dims[1], 1)
    here = fn.call(A.eq.Tensor, columns, place)
    known = fn.call(A.clamp.default, after, 0)  # ids: behind `place` any will do
    return place, fn.call(A.where.self, here, best, known)
