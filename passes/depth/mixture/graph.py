"""Let a trained router decide, before some layers, whether a token runs through them.

Before (a step that `cut_depth` cut behind each layer)::

    func step.0(tokens, ..., stream) -> kv.0.key, ..., stream {
      ... %h0: f32[B,T,H] = graftwork.hidden(%x0, layer=0, point="block") ...
    func step.1(positions, past, kv.1.key, ..., stream) -> kv.1.key, ..., stream { ... layer 1 ... }

After (every=2)::

    func step.0(tokens, ..., stream) -> kv.0.key, ..., stream, route f32[B,T] {
      ... %h0 ...
      %route: f32[B,T] = sigmoid(squeeze(linear(%h0, @routers.1.weight, @routers.1.bias)))
    func step.1.fill(positions, past, kv.1.key, ..., stream) -> kv.1.key, ... {
      ... keys and values of layer 1 on what the stream holds ...
    decode {
      depth = mixture(functions=("step.1.fill", ...), routed=(1, 3), shares=(...), ...)

Every other layer has a router, a linear function of the state before it. In training the tokens of
a window with the highest scores run through the layer, as many as a cosine schedule gives it: the
share 0.5 cos(pi l / (L - 1)) + `shift` of layer l of 0..L-1, 1 at most and `least` at least (Zhang
et al., "p-MoD: Building Mixture-of-Depths MLLMs via Progressive Ratio Decay", 2024; Raposo et al.,
"Mixture-of-Depths: Dynamically allocating compute in transformer-based language models", 2024). In
decoding nobody knows the scores of tokens to come, so a token runs through the layer where its
score says with more than `threshold` that it would be among them: routers learn that, too. A token
that passes by leaves the layer keys and values of the state that it passes with, so no cache row is
ever lacking. Until somebody trains the routers, nothing asks them. Runs right after `cut_depth`.
Refuses steps that are not cut behind each layer, and models without a layer to route.
"""

from __future__ import annotations

import math
import zlib
from typing import ClassVar

import torch
from pydantic import Field

from ....ir import Function, PassError, Program, Weight, WeightStore, type_of
from ....ir.plan.bounds import Share
from ...drafting.draft_pass import TrainedPass
from ...drafting.trained import TrainedWeights
from ...engine.base import Effect, Outcome
from ...engine.plan_edits import with_record
from ...policies import builds
from ..confident.graph import check_whole_layers, filling, scored
from . import MixtureDepth

G = torch.ops.graftwork
NAME, SCORE = "routers", "route"


@builds(MixtureDepth)
class DepthMixture(TrainedPass):
    """every: layers from one router to the next. shift, least: of the schedule. The rest: see
    `TrainedPass` and the record."""

    every: int = Field(default=2, ge=2, le=64)
    shift: float = Field(default=0.5, ge=0, le=1)
    least: Share = 0.15

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS, Effect.DECODE_PLAN})
    reads: ClassVar[frozenset[Effect]] = frozenset()

    def insert(self, program: Program) -> Outcome:
        check_whole_layers(program, self.name)
        step = program.plan.step
        *segments, _ = step.parts
        layers = len(segments)
        if step.cuts != tuple(range(1, layers)):
            raise PassError(
                f"{self.name}: expected a step that is cut behind each layer, got "
                f"step={step.brief}: set cut_depth.every=1"
            )
        routed = tuple(range(1, layers - 1, self.every))
        if not routed:
            raise PassError(
                f"{self.name}: the first and the last layer run in any case, and {layers} layers "
                f"leave none for a router"
            )
        trained = TrainedWeights(self.weights, self.name, program)
        functions, weights = dict(program.functions), program.weights
        fills = [filling(program, segments[place]) for place in routed]
        functions |= {fill.name: fill for fill in fills}
        for place in routed:
            before = segments[place - 1]
            functions[before], weights = _routing(program.function(before), place, weights, trained)
        record = self.made(
            functions=tuple(fill.name for fill in fills),
            routers=tuple(segments[place - 1] for place in routed),
            routed=routed,
            shares=tuple(schedule(place, layers, self.shift, self.least) for place in routed),
        )
        made = program.replace(functions=functions, weights=weights)
        return Outcome(with_record(made, self.name, record), len(routed))


def schedule(layer: int, layers: int, shift: float, least: float) -> float:
    """The share of tokens that run through a layer.

    >>> [round(schedule(layer, 9, 0.5, 0.15), 3) for layer in (0, 2, 4, 7)]
    [1.0, 0.854, 0.5, 0.15]
    """
    share = 0.5 * math.cos(math.pi * layer / (layers - 1)) + shift
    return round(min(max(share, least), 1.0), 4)


def _routing(
    segment: Function, layer: int, weights: WeightStore, trained: TrainedWeights
) -> tuple[Function, WeightStore]:
    """A segment that returns, too, what the router of the layer behind it says."""
    kind = type_of(segment.calls(G.hidden.default)[-1])
    size = int(str(kind.dims[-1]))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{NAME}.{layer}".encode()))
    # A tenth of the usual size: scores are near the bias's, and differ.
    rows = torch.randn(1, size, generator=generator) * 0.1 / size**0.5
    fresh = {"weight": rows, "bias": torch.full((1,), 2.0)}
    parts = [
        trained.of(Weight.of(f"{NAME}.{layer}.{name}", value.to(kind.dtype)))
        for name, value in fresh.items()
    ]
    return scored(segment, parts, SCORE), weights.adding(*parts)
