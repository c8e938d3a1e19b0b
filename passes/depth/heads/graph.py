"""Let tokens leave at the first exit whose own head is sure of what comes next.

Before (a step that `cut_depth` cut after layer 0)::

    func step(tokens, ...) -> logits, argmax, kv.0.key, ... { ... }
    func step.head(past, select, stream) -> logits, argmax {
      %p: f32[B,S,H] = graftwork.cache_read(%stream, %past, %select)
      ... final norm and head on %p ...

After::

    func step(tokens, ...) -> logits, argmax, kv.0.key, ..., hidden.0 f32[B,T,H] { ... }
    func step.0.exit(past, select, stream) -> logits, argmax {
      %p: f32[B,S,H] = graftwork.cache_read(%stream, %past, %select)
      %y: f32[B,S,H] = %p + silu(linear(%p, @exits.0.0.linear.weight, @exits.0.0.linear.bias))
      ... final norm and head on %y ...
    func step.1.fill(positions, past, kv.1.key, ..., stream) -> kv.1.key, ... { ... }
    decode {
      depth = heads(threshold=0.9, functions=("step.1.fill",), heads=("step.0.exit",), ...)

Every cut is an exit with a head of its own: `layers` residual blocks in front of the target's norm
and head, which all exits share. They learn, by `graftwork train`, the distribution that the whole
model has for the same token, so no text is labelled (Valade, "Accelerating Large Language Model
Inference with Self-Supervised Early Exits", 2024); the target stays as it is. A head that nobody
trained says what the target's own says there. Where a head's likeliest token is more probable than
its second by more than the threshold, the text goes on from there, and the deeper layers' keys and
values are made of that state, as in `depth_confident`. The threshold is found on text by
`graftwork.calibrate_exits`. Refuses steps that are not cut, or inside layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ....ir import Function, PassError, Program, Weight, WeightStore, type_of
from ....ir.execution.analysis import blocks_of
from ...drafting.draft_pass import TrainedPass
from ...drafting.trained import TrainedWeights
from ...engine.base import Effect, Outcome
from ...engine.plan_edits import with_record
from ...policies import builds
from ..confident.graph import check_whole_layers, filling
from . import HeadsDepth

A, G = torch.ops.aten, torch.ops.graftwork
NAME = "exits"


@builds(HeadsDepth)
class DepthHeads(TrainedPass):
    """layers: blocks of each head. The rest: see `TrainedPass` and the record."""

    layers: int = Field(default=1, ge=1, le=16)

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS, Effect.DECODE_PLAN})
    reads: ClassVar[frozenset[Effect]] = frozenset()

    def insert(self, program: Program) -> Outcome:
        check_whole_layers(program, self.name)
        plan = program.plan.step
        *segments, head = plan.parts
        trained = TrainedWeights(self.weights, self.name, program)
        functions, weights = dict(program.functions), program.weights
        heads = [f"{segment}.exit" for segment in segments[:-1]]
        for index, name in enumerate(heads):
            made, weights = self._head(program.function(head), name, index, weights, trained)
            functions[name] = made
        fills = [filling(program, name) for name in segments[1:]]
        functions |= {fill.name: fill for fill in fills}
        taught = _tapped(program.step, [int(cut) - 1 for cut in plan.cuts], self.name)
        functions[taught.name] = taught
        record = self.made(
            functions=tuple(fill.name for fill in fills),
            heads=tuple(heads),
            outputs=tuple(f"hidden.{int(cut) - 1}" for cut in plan.cuts),
        )
        added = program.replace(functions=functions, weights=weights)
        return Outcome(with_record(added, self.name, record), len(heads))

    def _head(
        self,
        head: Function,
        name: str,
        index: int,
        weights: WeightStore,
        trained: TrainedWeights,
    ) -> tuple[Function, WeightStore]:
        """The target's head behind blocks of its own, as a function."""
        fn = Function(name, head.copy().graph, head.role)
        given = fn.calls(G.cache_read.default)[0]
        kind = type_of(given)
        size = int(str(kind.dims[-1]))
        shapes = {"weight": (size, size), "bias": (size,)}
        readers = list(given.users)
        x = given
        for layer in range(self.layers):
            parts = []
            for part, shape in shapes.items():
                zeros = torch.zeros(shape, dtype=kind.dtype)
                weight = Weight.of(f"{NAME}.{index}.{layer}.linear.{part}", zeros)
                weights = weights.adding(trained.of(weight))
                parts.append(weight)
            with fn.graph.inserting_before(min(readers)):
                nodes = [fn.weight(weight) for weight in parts]
                inner = fn.call(A.silu.default, fn.call(A.linear.default, x, *nodes))
                x = fn.call(A.add.Tensor, x, inner)
        for reader in readers:
            reader.replace_input_with(given, x)
        return fn, weights


def _tapped(step: Function, layers: Sequence[int], owner: str) -> Function:
    """The step, returning the states behind some layers, too, for training alone."""
    fn = step.copy()
    blocks = blocks_of(fn)
    if missing := [layer for layer in layers if layer not in blocks]:
        raise PassError(f"{owner}: {fn.name} has no marker behind layer {missing[0]}")
    taps = {f"hidden.{layer}": blocks[layer] for layer in layers}
    fn.set_outputs({**fn.outputs, **taps})
    return fn
