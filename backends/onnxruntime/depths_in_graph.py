"""Steps inside a graph, as deep as the plan says: for each record that can, what its policy does.

A policy asks where `runtime.depth` asks, and by the same numbers. Sequences run one after the
other there, so each leaves alone, where a batch of the runtime's leaves together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as oir
import torch

from ...ir import Program, UnsupportedError, type_of
from ...ir.plan import DepthRecord, FullDepth, Prefilled, Segments
from ...ir.plan.depth import ThresholdDepth
from ...passes.depth.budget import DecayBudget, LinearBudget
from ...passes.depth.confident import ConfidentDepth
from ...passes.depth.deferred import DeferredDepth
from ...passes.depth.mlp import MlpDepth
from ...passes.drafting.exit import ExitDraft
from .attention import SEQLENS, TOTAL
from .emit import DTYPES
from .graph_builder import BOOL, F32, F64, I64, GraphBuilder
from .steps_in_graph import Fed, Steps, Values, either, nothing

LACKING, SURE, BEST = "lacking", "sure", ("argmax", "logits")

Form = Callable[[GraphBuilder, Any, Steps, Fed, Values], Values]


def run_step(g: GraphBuilder, steps: Steps, fed: Fed, values: Values) -> Values:
    """Put a step into a graph; all values after it: states, and what is wanted of its outputs."""
    plan = steps.program.plan
    if isinstance(plan.step, Segments):
        return DEPTHS[type(plan.depth)](g, plan.depth, steps, fed, values)
    later = steps.call(plan.step.fed(argmax=True)[0], fed.given)
    if not isinstance(plan.step, Prefilled):
        return {**values, **later(g, values)}
    prompt = steps.call(plan.step.prefill, fed.given)
    return either(g, fed.first, prompt, later, values, "prompt")


def carried(program: Program) -> dict[str, int]:
    """Numbers i64[] that a step leaves to the next, besides states, and what they begin with."""
    return {LACKING: 0} if isinstance(program.plan.depth, DeferredDepth) else {}


def called(program: Program) -> tuple[str, ...]:
    """Functions that run the target, in order: the last one gives the logits."""
    step = program.plan.step
    names = step.parts or (step.read(argmax=True)[0], step.fed(argmax=True)[0])
    return tuple(dict.fromkeys(names))


def led(program: Program) -> tuple[str, ...]:
    """The first parts of a step, through which its draft has led tokens already."""
    plan = program.plan
    if not isinstance(plan.draft, ExitDraft):
        return ()
    return plan.step.parts[: sum(cut <= plan.draft.exit for cut in plan.step.cuts)]


def full(g: GraphBuilder, record: FullDepth, steps: Steps, fed: Fed, values: Values) -> Values:
    """All parts. What a draft has led through the first ones already is not fed to them again."""
    before = led(steps.program)
    for name in before:
        part = steps.call(name, fed.given)
        values = either(g, fed.first, part, nothing, values, f"fed.{name}")
    for name in called(steps.program)[len(before) :]:
        values = {**values, **steps.call(name, fed.given)(g, values)}
    return values


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
        return g.op("Max", layers, g.const(record.least))
    most = record.most or total
    share = g.op("Min", g.op("Div", along, number(record.tokens)), number(1.0))
    fallen = g.op("Mul", number(most - record.least), share)
    return g.cast(g.op("Sub", number(most), fallen), I64)


def confident(
    g: GraphBuilder, record: ConfidentDepth, steps: Steps, fed: Fed, values: Values
) -> Values:
    """Part by part; a token leaves where it is sure, and deeper rows are made of its state."""
    first, *parts, head = called(steps.program)
    values = {**values, **steps.call(first, fed.given)(g, values), **_unasked(g, steps)}
    left = g.const(False, np.bool_)
    for part, fill in zip(parts, record.functions, strict=True):
        asks = g.op("And", fed.lone, g.op("Not", left))
        values = _asked(g, asks, record, steps, fed, values)
        left = g.op("Or", left, values[SURE])
        out, on = (steps.call(name, fed.given) for name in (fill, part))
        values = either(g, left, out, on, values, f"exit.{part}")
    known = left if not record.score else g.const(False, np.bool_)
    return either(g, known, nothing, steps.call(head, fed.given), values, "exit.head")


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
    values |= _unasked(g, steps)
    asks = g.op("And", fed.lone, g.op("Less", values[LACKING], g.const(record.pending)))
    values = _asked(g, asks, record, steps, fed, values)

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


def without_mlps(
    g: GraphBuilder, record: MlpDepth, steps: Steps, fed: Fed, values: Values
) -> Values:
    """Part by part; once an MLP has left a token as it was, the others that may be are left out."""
    *parts, head = called(steps.program)
    places = set(record.places(steps.program.plan.step))
    written = g.op("Greater", g.op("Add", fed.place, g.const(1)), g.const(record.warm))
    asks, idle = g.op("And", fed.lone, written), g.const(False, np.bool_)
    unlike = g.const([[-2.0]], np.float32)  # less than any cosine
    kind = _dtype(steps.program, parts[min(places)], record.score)
    values = {**values, record.score: g.typed("Cast", kind, unlike, to=int(kind))}
    for place, name in enumerate(parts):
        part = steps.call(name, fed.given)
        if place not in places:
            values = {**values, **part(g, values)}
            continue
        values = either(g, idle, nothing, part, values, f"mlp.{name}")
        alike = _first(g, values[record.score])
        same = g.op("Greater", alike, g.const(record.similarity, np.float32))
        idle = g.op("Or", idle, g.op("And", asks, same))
    return {**values, **steps.call(head, fed.given)(g, values)}


DEPTHS: Mapping[type[DepthRecord], Form] = {
    FullDepth: full,
    LinearBudget: budgeted,
    DecayBudget: budgeted,
    ConfidentDepth: confident,
    DeferredDepth: deferred,
    MlpDepth: without_mlps,
}
"""By record."""


def _unasked(g: GraphBuilder, steps: Steps) -> Values:
    """What stands for an answer where nobody asks."""
    kind = _dtype(steps.program, called(steps.program)[-1], "logits")
    return {
        SURE: g.typed("Identity", BOOL, g.const(False, np.bool_)),
        "argmax": g.typed("Identity", I64, g.const([[0]])),
        "logits": g.typed("Cast", kind, g.const([[[0.0]]], np.float32), to=int(kind)),
    }


def _asked(
    g: GraphBuilder,
    asks: oir.Value,
    record: ThresholdDepth,
    steps: Steps,
    fed: Fed,
    values: Values,
) -> Values:
    """All values, with `SURE`: whether a token may leave by the head's logits on what was run so
    far, or by a score that the last part has returned. Where nobody asks, it may not."""
    bound = _bound(g, record, fed)
    if record.tokens:
        asks = g.op("And", asks, g.op("Less", fed.place, g.const(record.tokens - 1)))
    score = getattr(record, "score", "")
    if score:
        above = g.op("Greater", g.cast(_first(g, values[score]), F64), bound)
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


def _first(g: GraphBuilder, value: oir.Value) -> Any:
    """The first entry [] of a value, as f32."""
    return g.cast(g.op("Gather", g.op("Reshape", value, g.const([-1])), g.const(0)), F32)


def _dtype(program: Program, name: str, output: str) -> Any:
    return DTYPES[type_of(program.function(name).outputs[output]).dtype]


def _layers(program: Program, name: str) -> int:
    markers = program.function(name).calls(torch.ops.graftwork.hidden.default)
    return sum(marker.kwargs["point"] == "block" for marker in markers)
