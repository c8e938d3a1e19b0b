"""Drafts of the first layers inside an ONNX loop."""

from __future__ import annotations

import onnx_ir as oir

from ....backends.onnxruntime.chains_in_graph import Stepped, chain
from ....backends.onnxruntime.emit import DTYPES
from ....backends.onnxruntime.graph_builder import BOOL, I64, GraphBuilder
from ....backends.onnxruntime.steps_in_graph import Values
from ....ir.plan import DecodePlan
from . import ExitDraft


def leads(plan: DecodePlan) -> tuple[str, ...]:
    """The first parts of a step, up to the exit."""
    assert isinstance(plan.draft, ExitDraft)
    return plan.step.parts[: sum(cut <= plan.draft.exit for cut in plan.step.cuts)]


@chain(ExitDraft, leads=leads)
def by_first_layers(g: GraphBuilder, record: ExitDraft, step: Stepped) -> tuple[oir.Value, Values]:
    """The step's first parts and a head, token by token, in a Loop. They have the last committed
    token and the whole chain behind them then: verification goes on from there."""
    functions, program = step.functions, step.functions.program
    parts = leads(program.plan)
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
    drafted = g.slice(g.op("Reshape", tokens, g.const([-1])), None, count)
    return drafted, {**step.values, **dict(zip(changed, after, strict=True))}
