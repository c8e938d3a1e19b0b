"""Exits that are sure inside an ONNX loop."""

from __future__ import annotations

import numpy as np

from ....backends.onnxruntime.depths_in_graph import SURE, asked, called, depth, unasked
from ....backends.onnxruntime.graph_builder import GraphBuilder
from ....backends.onnxruntime.steps_in_graph import Fed, Steps, Values, either, nothing
from . import ConfidentDepth


@depth(ConfidentDepth)
def confident(
    g: GraphBuilder, record: ConfidentDepth, steps: Steps, fed: Fed, values: Values
) -> Values:
    """Part by part; a token leaves where it is sure, and deeper rows are made of its state."""
    first, *parts, head = called(steps.program)
    values = {**values, **steps.call(first, fed.given)(g, values), **unasked(g, steps)}
    left = g.const(False, np.bool_)
    for part, fill in zip(parts, record.functions, strict=True):
        asks = g.op("And", fed.lone, g.op("Not", left))
        values = asked(g, asks, record, steps, fed, values, record.score)
        left = g.op("Or", left, values[SURE])
        out, on = (steps.call(name, fed.given) for name in (fill, part))
        values = either(g, left, out, on, values, f"exit.{part}")
    known = left if not record.score else g.const(False, np.bool_)
    return either(g, known, nothing, steps.call(head, fed.given), values, "exit.head")
