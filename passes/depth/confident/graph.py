"""Let tokens leave at the first exit that is sure of what comes next (CALM).

Before (a step that `cut_depth` cut after layer 0)::

    func step.0(tokens, ..., stream) -> kv.0.key, ..., stream {
      ... %h0: f32[B,T,H] = graftwork.hidden(%x0, layer=0, point="block") ...
    func step.1(positions, past, kv.1.key, ..., stream) -> kv.1.key, ..., stream {
      %r: f32[B,T,H] = graftwork.cache_read(%stream, %past, 0 .. T-1)
      ... layer 1 on %r, layer 2 on %h1 ...

After (measure="saturation")::

    func step.0(tokens, ..., stream) -> kv.0.key, ..., stream, sure f32[B,T] {
      ... %sure: f32[B,T] = cosine(%e, %h0)
    func step.1.fill(positions, past, kv.1.key, ..., stream) -> kv.1.key, ... {
      %r: f32[B,T,H] = graftwork.cache_read(%stream, %past, 0 .. T-1)
      ... keys and values of layer 1 on %r, and of layer 2 on %r, too ...
    decode {
      depth = confident(threshold=0.9, ..., functions=("step.1.fill",), score="sure")

Every cut is an exit. Where the confidence of all sequences is above the threshold, the head runs
on the state there, and the deeper layers' keys and values are made of that state, each as if the
layers before had left it as it is (Schuster et al., "Confident Adaptive Language Modeling", 2022).
measure: "margin", the difference of the two largest probabilities by the target's own head, which
then runs at every exit that is asked; "saturation", the cosine of the states before and after the
last layer; "probe", a linear classifier of the state, fitted here on text (`data`) to tell whether
the head would say there what it says at the end. Which threshold holds a promise about the text,
`graftwork.calibrate_exits` finds out. Runs right after `cut_depth`. Refuses steps that are not cut,
and thresholds outside 0..1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.fx
from pydantic import Field

from ....ir import Function, PassError, Program, Weight, WeightStore, site_of, type_of
from ....ir.rewrite.cleanup import sweep
from ...engine.base import Effect, Evidence, Outcome, TextSample
from ...engine.plan_edits import with_record
from ...policies import RecordPass, builds
from ..probes import Probe, fitted_probes
from . import ConfidentDepth

A, G = torch.ops.aten, torch.ops.graftwork
SCORE = "sure"


@builds(ConfidentDepth)
class DepthConfident(RecordPass):
    """measure: of confidence: margin, saturation or probe. windows, length: of the text that probes
    are fitted on. The rest: see the record."""

    measure: Literal["margin", "saturation", "probe"] = "margin"
    windows: int = Field(default=16, ge=1, le=4096)
    length: int = Field(default=128, ge=2, le=4096)

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS, Effect.DECODE_PLAN})

    @property
    def text(self) -> TextSample | None:
        return TextSample(self.windows, self.length) if self.measure == "probe" else None

    def run(self, program: Program) -> Outcome:
        return self._made(program, {})

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        assert self.text is not None
        windows = evidence.sampled(self.text, program)
        return self._made(program, fitted_probes(program, windows))

    def _made(self, program: Program, probes: Mapping[str, Probe]) -> Outcome:
        """probes: by segment."""
        *segments, _ = program.plan.step.parts
        check_whole_layers(program, self.name)
        functions, weights = dict(program.functions), program.weights
        for name in segments[:-1]:
            if self.measure == "saturation":
                functions[name] = saturating(program.function(name), self.name)
            elif self.measure == "probe":
                functions[name], weights = _probed(program.function(name), weights, probes[name])
        fills = [filling(program, name) for name in segments[1:]]
        functions |= {fill.name: fill for fill in fills}
        score = "" if self.measure == "margin" else SCORE
        names = tuple(fill.name for fill in fills)
        record = self.made(functions=names, score=score)
        made = program.replace(functions=functions, weights=weights)
        return Outcome(with_record(made, self.name, record), len(fills))


def check_whole_layers(program: Program, owner: str) -> None:
    """That a step is cut behind whole layers alone. Errors: `PassError` naming `owner`."""
    if program.plan.step.halves:
        raise PassError(
            f"{owner}: tokens leave behind whole layers, and step={program.plan.step.brief} is cut "
            f"inside some: leave cut_depth.sublayers out"
        )


def filling(program: Program, segment: str) -> Function:
    """A function that makes a segment's cache rows of the state that the segment takes up."""
    whole = program.function(segment)
    fn = Function(f"{segment}.fill", whole.copy().graph, whole.role)
    (given,) = _stream(fn)
    for marker in _markers(fn):
        marker.replace_all_uses_with(given)
    carried = given.all_input_nodes[0].target
    kept = {n: v for n, v in fn.outputs.items() if n in program.states and n != carried}
    fn.set_outputs(kept)
    sweep(fn)
    return fn


def saturating(segment: Function, owner: str) -> Function:
    """A segment that returns, too, the cosine of the states before and after its last layer, as
    `SCORE`. owner: who asks. Errors: `PassError` where nothing is before."""
    fn = segment.copy()
    *before, last = [*_stream(fn), *_markers(fn, "embedding"), *_markers(fn)]
    if not before:
        raise PassError(
            f"{owner}: {fn.name} has no graftwork.hidden marker before its layer to compare with: "
            f"cut behind more layers, or measure margin or probe"
        )
    with fn.graph.inserting_before(fn.output_node):
        pair = [_in_float(fn, node) for node in (before[-1], last)]
        ab, aa, bb = (_dot(fn, a, b) for a, b in (pair, pair[:1] * 2, pair[1:] * 2))
        scale = fn.call(A.rsqrt.default, fn.call(A.mul.Tensor, aa, bb))
        score = fn.call(A.mul.Tensor, ab, scale, site=site_of(last))
    fn.set_outputs({**fn.outputs, SCORE: score})
    return fn


def _probed(segment: Function, weights: WeightStore, probe: Probe) -> tuple[Function, WeightStore]:
    """A segment that returns, too, what a linear classifier says of the state behind it."""
    dtype = type_of(_markers(segment)[-1]).dtype
    parts = [
        Weight.of(f"{segment.name}.probe.{kind}", tensor.to(dtype))
        for kind, tensor in zip(("weight", "bias"), probe, strict=True)
    ]
    return scored(segment, parts, SCORE), weights.adding(*parts)


def scored(segment: Function, parts: Sequence[Weight], name: str) -> Function:
    """A segment that returns, too, as `name`, what a classifier with a weight [1,H] and a bias [1]
    says of the state behind it: a probability f32[B,T]."""
    fn = segment.copy()
    last = _markers(fn)[-1]
    with fn.graph.inserting_before(fn.output_node):
        odds = fn.call(A.linear.default, last, *map(fn.weight, parts), site=site_of(last))
        score = fn.call(A.sigmoid.default, fn.call(A.squeeze.dim, _in_float(fn, odds), -1))
    fn.set_outputs({**fn.outputs, name: score})
    return fn


def _in_float(fn: Function, node: torch.fx.Node) -> torch.fx.Node:
    if type_of(node).dtype == torch.float32:
        return node
    return fn.call(A._to_copy.default, node, dtype=torch.float32)


def _dot(fn: Function, a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
    """Of the last axis."""
    return fn.call(A.sum.dim_IntList, fn.call(A.mul.Tensor, a, b), [-1])


def _stream(fn: Function) -> list[torch.fx.Node]:
    """What a segment reads of the states that earlier ones left; nothing in the first."""
    return fn.calls(G.cache_read.default)[:1]


def _markers(fn: Function, point: str = "block") -> list[torch.fx.Node]:
    return [node for node in fn.calls(G.hidden.default) if node.kwargs["point"] == point]
