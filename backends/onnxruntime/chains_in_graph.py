"""Chains drafted inside a graph: for each record that can, what its drafter does, as ONNX nodes.

A chain may be anything: the step verifies it, and it changes no token. So length policies, which
decide how much of a draft is worth its time, are left to the loop's caller, who has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as oir

from ...ir import Program
from ...ir.plan import DraftRecord, FusedDraft, HeadsDraft, NoDraft
from ...passes.drafting.exit import ExitDraft
from ...passes.drafting.suffix import SuffixDraft
from .depths_in_graph import led
from .emit import DTYPES
from .graph_builder import BOOL, I64, GraphBuilder
from .steps_in_graph import Functions, Values

Given = Callable[[GraphBuilder, oir.Value, oir.Value, oir.Value], Values]
"""Inputs of functions that are fed tokens i64[B,T] behind rows i64[B], choosing at columns."""


@dataclass(frozen=True)
class Stepped:
    """What a drafter may look at: the text i64[L] up to the last committed token; the source i64[R]
    that it is written from, where it is one of the same vocabulary; the column i64[] of the last of
    the step's tokens that was kept; how many tokens there is room for, i64[]; all values after the
    step: states, and outputs of its; and the program's functions."""

    text: oir.Value
    source: oir.Value | None
    column: oir.Value
    room: oir.Value
    values: Values
    functions: Functions
    given: Given


Drafting = Callable[[GraphBuilder, Any, Program, Stepped], tuple[oir.Value, Values]]
"""The next chain, i64[D], of which as much is taken as there is room for; and the values then."""


def no_chain(
    g: GraphBuilder, record: NoDraft, program: Program, step: Stepped
) -> tuple[oir.Value, Values]:
    """Nothing."""
    return g.none_of(step.text), step.values


def copied(
    g: GraphBuilder, record: SuffixDraft, program: Program, step: Stepped
) -> tuple[oir.Value, Values]:
    """What followed the most recent of the longest earlier matches of the text's end, see
    `passes.drafting.suffix`: all lengths at once, at places of the last token alone."""
    text, zero, one = step.text, g.const(0), g.const(1)
    if step.source is not None:
        text = g.op("Concat", step.source, text, axis=0)
    length = g.size(text, 0)
    last = g.op("Sub", length, one)
    back = g.range(zero, g.const(record.longest))
    same = g.op("Equal", g.slice(text, None, last), g.slice(text, last, None))
    found = g.op("Squeeze", g.op("NonZero", same), g.const([0]))
    ends = g.op("Concat", g.const([-1]), found, axis=0)  # one of no match, so that there is one
    places = g.op("Sub", g.op("Unsqueeze", ends, g.const([1])), back)
    theirs = g.op("Gather", text, g.op("Max", places, zero))
    ours = g.op("Gather", text, g.op("Max", g.op("Sub", last, back), zero))
    alike = g.op("And", g.op("Equal", theirs, ours), g.op("GreaterOrEqual", places, zero))
    sizes = g.leading(alike, 1)
    best = g.op("ReduceMax", sizes, keepdims=0)
    which = g.op("ArgMax", sizes, axis=0, keepdims=0, select_last_index=1)
    place = g.op("Gather", ends, which)
    start = g.op("Add", place, one)
    count = g.op("Sub", length, start)
    turn = g.op("Mod", g.range(zero, g.const(record.tokens)), count)
    chain = g.op("Gather", text, g.op("Add", start, turn))
    enough = g.op("GreaterOrEqual", best, g.const(record.shortest))
    drafted = g.op("Where", enough, g.const(record.tokens), zero)
    return g.slice(chain, None, drafted), step.values


def by_heads(
    g: GraphBuilder, record: HeadsDraft, program: Program, step: Stepped
) -> tuple[oir.Value, Values]:
    """The best candidate of each head."""
    hidden = g.op("Gather", step.values["hidden"], g.vector(step.column), axis=1)
    made = step.functions.call(g, record.function, {"hidden": hidden})["draft_tokens"]
    depth = program.plan.tree.most
    best = g.op("Gather", made, g.const(0), axis=3)
    chain = g.op("Reshape", best, g.const([-1]))
    return g.slice(chain, None, g.const(record.levels if depth is None else depth)), step.values


def in_the_step(
    g: GraphBuilder, record: FusedDraft, program: Program, step: Stepped
) -> tuple[oir.Value, Values]:
    """What the step has made, if it goes on from the last token that was kept."""
    made = g.op("Reshape", step.values["drafted"], g.const([-1]))
    place = g.op("Gather", made, g.const(0))
    count = g.op("Where", g.op("Equal", place, step.column), g.const(1 + record.levels), g.const(1))
    return g.slice(made, g.const(1), count), step.values


def by_first_layers(
    g: GraphBuilder, record: ExitDraft, program: Program, step: Stepped
) -> tuple[oir.Value, Values]:
    """The step's first parts and a head, token by token, in a Loop. They have the last committed
    token and the whole chain behind them then: verification goes on from there."""
    parts, functions = led(program), step.functions
    body = g.body("generate.draft")
    token, place = body.input("token", I64, [1, 1]), body.input("place", I64, [])
    changed = [n for n in program.states if any(n in functions.of(p).outputs for p in parts)]
    types = {name: program.states[name].type for name in changed}
    own = {
        name: body.input(name, DTYPES[type.dtype], [f"{name}.{i}" for i in range(len(type.dims))])
        for name, type in types.items()
    }
    # As in the step: kernels add a lone token up in another order.
    fed = body.op("Concat", token, token, axis=1) if functions.twice(parts) else token
    given = step.given(body, fed, body.vector(place), body.const([[0]]))
    values = {**step.values, **own}
    for part in parts:
        values |= functions.call(body, part, {**values, **given})
    hidden = body.slice(values[record.output], None, body.const(1), 1)
    made = functions.call(body, record.function, {"hidden": hidden})["draft_tokens"]
    best = body.op("Gather", body.op("Reshape", made, body.const([-1])), body.const([0]))
    body.output("going_on", body.graph.inputs[1], BOOL, [])
    body.output("token_next", body.op("Unsqueeze", best, body.const([0])), I64, None)
    body.output("place_next", body.op("Add", place, body.const(1)), I64, [])
    for name in changed:
        body.output(f"{name}_next", values[name], DTYPES[types[name].dtype], None)
    body.output("drafted", best, I64, None)
    count = g.op("Min", step.room, g.const(min(record.levels, program.plan.columns)))
    last = g.op("Unsqueeze", g.slice(step.text, g.const(-1), None), g.const([0]))
    start = [last, g.op("Sub", g.size(step.text, 0), g.const(1))]
    start += [step.values[name] for name in changed]
    _, _, *after, tokens = g.loop(body, g.op("Add", count, g.const(1)), None, start)
    chain = g.slice(g.op("Reshape", tokens, g.const([-1])), None, count)
    return chain, {**step.values, **dict(zip(changed, after, strict=True))}


CHAINS: Mapping[type[DraftRecord], Drafting] = {
    NoDraft: no_chain,
    SuffixDraft: copied,
    HeadsDraft: by_heads,
    FusedDraft: in_the_step,
    ExitDraft: by_first_layers,
}
"""By record; `SuffixDraft` serves copyspec and prompt lookup."""
