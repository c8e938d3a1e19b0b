"""Rows made later inside an ONNX loop."""

from __future__ import annotations

from ....backends.onnxruntime.attention import SEQLENS, TOTAL
from ....backends.onnxruntime.depths_in_graph import SURE, asked, called, depth, unasked
from ....backends.onnxruntime.graph_builder import I64, GraphBuilder
from ....backends.onnxruntime.steps_in_graph import Fed, Steps, Values, either
from ....ir import UnsupportedError
from . import DeferredDepth

LACKING = "lacking"


@depth(DeferredDepth, carries={LACKING: 0})
def deferred(
    g: GraphBuilder, record: DeferredDepth, steps: Steps, fed: Fed, values: Values
) -> Values:
    """A token leaves after the first parts where it is sure; the rows that it lacks in the deeper
    ones are made with those of the next token that goes deep. Errors: `UnsupportedError` for a
    threshold that is learnt while decoding."""
    if record.posterior:
        raise UnsupportedError(
            f"depth={record.brief} learns its threshold while decoding, and a graph does not: set "
            f"depth_deferred.posterior=0 and a threshold, such as graftwork calibrate finds"
        )
    *parts, head = called(steps.program)
    count = steps.program.plan.step.cuts.index(record.exit) + 1
    for part in parts[:count]:
        values = {**values, **steps.call(part, fed.given)(g, values)}
    values |= unasked(g, steps)
    asks = g.op("And", fed.lone, g.op("Less", values[LACKING], g.const(record.pending)))
    values = asked(g, asks, record, steps, fed, values)

    def leave(g: GraphBuilder, values: Values) -> Values:
        return {LACKING: g.typed("Add", I64, values[LACKING], g.const(1))}

    def deepen(g: GraphBuilder, values: Values) -> Values:
        behind = g.op("Sub", fed.given["past"], values[LACKING])
        width = g.op("Add", g.size(fed.given["positions"], 1), values[LACKING])
        rows = g.op("Add", g.op("Unsqueeze", behind, g.const([1])), g.range(g.const(0), width))
        last = g.const(steps.program.info.context - 1)
        given = {"past": behind, "positions": g.op("Min", rows, last)}
        given |= {name: fed.given[name] for name in (SEQLENS, TOTAL)}
        for part in parts[count:]:
            values = {**values, **steps.call(part, given)(g, values)}
        values |= steps.call(head, fed.given)(g, values)
        return {**values, LACKING: g.typed("Identity", I64, g.const(0))}

    return either(g, values[SURE], leave, deepen, values, "exit")
