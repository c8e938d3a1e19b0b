"""Steps inside a graph, as deep as the plan says: for each record that can, what its policy does.

A policy asks where `runtime.depth` asks, and by the same numbers. Sequences run one after the
other there, so each leaves alone, where a batch of the runtime's leaves together. A method's form
stands in `loop.py` of its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as oir

from ...ir import Program, type_of
from ...ir.plan import DepthRecord, FullDepth, Prefilled, Segments
from ...ir.plan.depth import ThresholdDepth
from ...ir.support.discovery import LOOP, import_methods
from .chains_in_graph import chain_of
from .emit import DTYPES
from .graph_builder import BOOL, F32, F64, I64, GraphBuilder
from .steps_in_graph import Fed, Steps, Values, either, nothing

SURE, BEST = "may_leave", ("argmax", "logits")
"""Names of values in a graph: no output of a part is called so."""

Form = Callable[[GraphBuilder, Any, Steps, Fed, Values], Values]
"""Runs a step by a record; all values after it."""


@dataclass(frozen=True)
class Depth:
    """What a depth policy does in a loop. carries: numbers i64[] that a step leaves to the next,
    besides states, and what they begin with."""

    run: Form
    carries: Mapping[str, int] = field(default_factory=dict)


DEPTHS: dict[type[DepthRecord], Depth] = {}
"""By record."""


def depth(*records: type[DepthRecord], **more: Any) -> Callable[[Form], Form]:
    """Decorator: the function runs steps for these records. more: see `Depth`."""

    def enter(function: Form) -> Form:
        DEPTHS.update(dict.fromkeys(records, Depth(function, **more)))
        return function

    return enter


def depth_of(record: DepthRecord) -> Depth | None:
    """What a depth policy does in a loop; None where it cannot."""
    import_methods(LOOP)
    return DEPTHS.get(type(record))


def run_step(g: GraphBuilder, steps: Steps, fed: Fed, values: Values) -> Values:
    """Put a step into a graph; all values after it: states, and what is wanted of its outputs."""
    plan = steps.program.plan
    if isinstance(plan.step, Segments):
        return DEPTHS[type(plan.depth)].run(g, plan.depth, steps, fed, values)
    later = steps.call(plan.step.fed(argmax=True)[0], fed.given)
    if not isinstance(plan.step, Prefilled):
        return {**values, **later(g, values)}
    prompt = steps.call(plan.step.prefill, fed.given)
    return either(g, fed.first, prompt, later, values, "prompt")


def called(program: Program) -> tuple[str, ...]:
    """Functions that run the target, in order: the last one gives the logits."""
    step = program.plan.step
    names = step.parts or (step.read(argmax=True)[0], step.fed(argmax=True)[0])
    return tuple(dict.fromkeys(names))


@depth(FullDepth)
def full(g: GraphBuilder, record: FullDepth, steps: Steps, fed: Fed, values: Values) -> Values:
    """All parts. What a draft has led through the first ones already is not fed to them again."""
    plan = steps.program.plan
    found = chain_of(plan.draft)
    before = () if found is None else found.leads(plan)
    for name in before:
        part = steps.call(name, fed.given)
        values = either(g, fed.first, part, nothing, values, f"fed.{name}")
    for name in called(steps.program)[len(before) :]:
        values = {**values, **steps.call(name, fed.given)(g, values)}
    return values


def unasked(g: GraphBuilder, steps: Steps) -> Values:
    """What stands for an answer where nobody asks."""
    kind = dtype_of(steps.program, called(steps.program)[-1], "logits")
    return {
        SURE: g.typed("Identity", BOOL, g.const(False, np.bool_)),
        "argmax": g.typed("Identity", I64, g.const([[0]])),
        "logits": g.typed("Cast", kind, g.const([[[0.0]]], np.float32), to=int(kind)),
    }


def asked(
    g: GraphBuilder,
    asks: oir.Value,
    record: ThresholdDepth,
    steps: Steps,
    fed: Fed,
    values: Values,
    score: str = "",
) -> Values:
    """All values, with `SURE`: whether a token may leave by the head's logits on what was run so
    far, or by a score that the last part has returned. Where nobody asks, it may not."""
    bound = _bound(g, record, fed)
    if record.tokens:
        asks = g.op("And", asks, g.op("Less", fed.place, g.const(record.tokens - 1)))
    if score:
        above = g.op("Greater", g.cast(first_entry(g, values[score]), F64), bound)
        return {**values, SURE: g.typed("And", BOOL, asks, above)}
    head = called(steps.program)[-1]

    def ask(g: GraphBuilder, values: Values) -> Values:
        outputs = steps.functions.call(g, head, {**values, **fed.given})
        flat = g.op("Reshape", outputs["logits"], g.const([-1, steps.program.info.vocab_size]))
        chances = g.op("Softmax", g.cast(g.slice(flat, None, g.const(1)), F32), axis=-1)
        best, _ = g.op("TopK", chances, g.const([2]), outputs=2)
        pair = [
            g.op("Squeeze", part) for part in g.op("Split", best, axis=1, num_outputs=2, outputs=2)
        ]
        margin = g.cast(g.op("Sub", *pair), F64)
        kept = {name: outputs[name] for name in BEST if name in steps.wanted}
        return {**kept, SURE: g.typed("Greater", BOOL, margin, bound)}

    def unsure(g: GraphBuilder, values: Values) -> Values:
        return {SURE: g.typed("Identity", BOOL, g.const(False, np.bool_))}

    return either(g, asks, ask, unsure, values, "asked")


def _bound(g: GraphBuilder, record: ThresholdDepth, fed: Fed) -> Any:
    """The threshold f64[] here: `record.bound`."""
    if record.decay == 0.0:
        return g.const(record.bound(0.0), np.float64)
    written = g.cast(g.op("Add", fed.place, g.const(1)), F64)
    most = g.const(record.tokens) if record.tokens else g.op("Max", fed.most, g.const(1))
    along = g.op("Div", written, g.cast(most, F64))
    falling = g.op("Exp", g.op("Mul", g.const(-record.decay, np.float64), along))
    tenth = g.op("Mul", g.const(0.1, np.float64), falling)
    share = g.op("Add", g.const(0.9, np.float64), tenth)
    return g.op("Mul", g.const(record.threshold, np.float64), share)


def first_entry(g: GraphBuilder, value: oir.Value) -> Any:
    """The first entry [] of a value, as f32."""
    return g.cast(g.op("Gather", g.op("Reshape", value, g.const([-1])), g.const(0)), F32)


def dtype_of(program: Program, name: str, output: str) -> Any:
    """The dtype of a function's output."""
    return DTYPES[type_of(program.function(name).outputs[output]).dtype]
