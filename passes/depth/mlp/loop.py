"""MLPs left out inside an ONNX loop."""

from __future__ import annotations

import numpy as np

from ....backends.onnxruntime.depths_in_graph import called, depth, dtype_of, first_entry
from ....backends.onnxruntime.graph_builder import GraphBuilder
from ....backends.onnxruntime.steps_in_graph import Fed, Steps, Values, either, nothing
from . import MlpDepth


@depth(MlpDepth)
def without_mlps(
    g: GraphBuilder, record: MlpDepth, steps: Steps, fed: Fed, values: Values
) -> Values:
    """Part by part; once an MLP has left a token as it was, the others that may be are left out."""
    *parts, head = called(steps.program)
    places = set(record.places(steps.program.plan.step))
    written = g.op("Greater", g.op("Add", fed.place, g.const(1)), g.const(record.warm))
    asks, idle = g.op("And", fed.lone, written), g.const(False, np.bool_)
    unlike = g.const([[-2.0]], np.float32)  # less than any cosine
    kind = dtype_of(steps.program, parts[min(places)], record.score)
    values = {**values, record.score: g.typed("Cast", kind, unlike, to=int(kind))}
    for place, name in enumerate(parts):
        part = steps.call(name, fed.given)
        if place not in places:
            values = {**values, **part(g, values)}
            continue
        values = either(g, idle, nothing, part, values, f"mlp.{name}")
        alike = first_entry(g, values[record.score])
        same = g.op("Greater", alike, g.const(record.similarity, np.float32))
        idle = g.op("Or", idle, g.op("And", asks, same))
    return {**values, **steps.call(head, fed.given)(g, values)}
