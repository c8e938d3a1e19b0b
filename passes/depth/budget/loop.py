"""Budgets of layers inside an ONNX loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as oir
import torch

from ....backends.onnxruntime.depths_in_graph import called, depth
from ....backends.onnxruntime.graph_builder import F64, I64, GraphBuilder
from ....backends.onnxruntime.steps_in_graph import Fed, Steps, Values, either, nothing
from ....ir import Program
from . import DecayBudget, LinearBudget, floor


@depth(LinearBudget, DecayBudget)
def budgeted(
    g: GraphBuilder, record: LinearBudget | DecayBudget, steps: Steps, fed: Fed, values: Values
) -> Values:
    """The first part, and as many of the last ones as the budget of layers allows."""
    *parts, head = called(steps.program)
    sizes = [_layers(steps.program, part) for part in parts]
    budget = _budget(g, record, sum(sizes), fed.place)
    values = {**values, **steps.call(parts[0], fed.given)(g, values)}
    for index, part in enumerate(parts[1:], 1):
        need = g.const(sizes[0] + sum(sizes[index:]))
        runs = g.op("Or", fed.first, g.op("LessOrEqual", need, budget))
        values = either(g, runs, steps.call(part, fed.given), nothing, values, f"deep.{part}")
    return {**values, **steps.call(head, fed.given)(g, values)}


def _budget(
    g: GraphBuilder, record: LinearBudget | DecayBudget, total: int, place: oir.Value
) -> Any:
    """Layers i64[] of the token at a place: `record.layers`, in the same arithmetic."""

    def number(value: float) -> oir.Value:
        return g.const(value, np.float64)

    along = g.cast(place, F64)
    if isinstance(record, DecayBudget):
        share = g.op("Pow", number(record.alpha), along)
        layers = g.cast(g.op("Mul", number(total), share), I64)
        return g.op("Max", layers, g.const(floor(record.least, total)))
    most = record.most or total
    share = g.op("Min", g.op("Div", along, number(record.tokens)), number(1.0))
    fallen = g.op("Mul", number(most - floor(record.least, total)), share)
    return g.cast(g.op("Sub", number(most), fallen), I64)


def _layers(program: Program, name: str) -> int:
    markers = program.function(name).calls(torch.ops.graftwork.hidden.default)
    return sum(marker.kwargs["point"] == "block" for marker in markers)
