"""Leave layers, or their attention or MLP alone, out of the model.

Before::

    %h0: f32[B,T,H] = graftwork.hidden(%x0, layer=0, point="block")
    ... layer 1 on %h0 ...
    %h1: f32[B,T,H] = graftwork.hidden(%x1, layer=1, point="block")
    ... layer 2 on %h1 ...

After (layers=[1])::

    %h0: f32[B,T,H] = graftwork.hidden(%x0, layer=0, point="block")
    ... layer 2 on %h0 ...

What reads the state behind a skipped part reads the one before it. The part's calls, weights and
caches go, and so does its marker, so that a tap there is refused. ``attention=[1]`` leaves out what
lies between the markers of layer 0 and layer 1's attention, ``mlp=[1]`` what lies between layer 1's
two markers.

``speedup`` chooses the layers by the rule of Unified Layer Skipping (Liu et al., "Accelerating
Inference in Large Language Models with a Unified Layer Skipping Strategy", 2024): of L layers
R = floor(L / speedup) stay, the first, the last, and multiples of floor(L / (R - 1)) until there
are R.

``count`` leaves so many layers out that a text misses least (see `importance`), where no others
are named: those without which, each by itself, the text's loss is smallest.

``prefill="full"`` keeps the whole model as a function of its own that prompts run through::

    func prefill(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    decode {
      step = prefilled(function="step", prefill="prefill")

Both share the caches of the layers that both have, so the weights that only prompts need stay. With
``prefill="same"`` prompts skip what every other token skips.

Refuses layers that there are not, parts that a block does not have (one whose attention and MLP run
side by side has no state between them), a choice that leaves no layer, and programs that have a
cache already. Matches nothing if nothing is to be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

import torch
import torch.fx
from pydantic import Field, model_validator

from ...ir import Function, PassError, Program
from ...ir.execution.analysis import blocks_of
from ...ir.plan.bounds import Rollout
from ...ir.rewrite.cleanup import sweep
from ..engine.base import (
    Contract,
    Effect,
    Evidence,
    LearningPass,
    Length,
    Outcome,
    TextSample,
    Windows,
    register,
)
from ..engine.plan_edits import Prompts, with_prefill
from .importance import Part, cosines, in_question, loss

G = torch.ops.graftwork

Layers = Annotated[tuple[int, ...], Field(max_length=4096)]


@register
class SkipLayers(LearningPass):
    """layers, attention, mlp: numbers of the layers to leave out, whole or in part; the first
    is 0, and the last -1. speedup: leave out so many layers that the rest are as many times
    faster, by the rule of Unified Layer Skipping. count: where none of these is set, of the layers
    that a text misses least. prefill: what prompts run through, the "same" layers or the "full"
    model. windows, length: of the text."""

    layers: Layers = ()
    attention: Layers = ()
    mlp: Layers = ()
    speedup: float | None = Field(default=None, gt=1, le=1e4, allow_inf_nan=False)
    count: Rollout = 0
    prefill: Prompts = "same"
    windows: Windows = 4
    length: Length = 256

    name: ClassVar[str] = "skip_layers"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.LAYER_SET})

    @model_validator(mode="after")
    def _chosen_once(self) -> Self:
        """Sets or a speed-up."""
        for name in ("layers", "attention", "mlp"):
            if getattr(self, name) and self.speedup is not None:
                raise ValueError(f"speedup chooses the layers itself: leave {name} out, or speedup")
        return self

    @property
    def bundled(self) -> bool:
        return True

    @property
    def text(self) -> TextSample | None:
        return self.sample if self.count and not self.moot else None

    @property
    def moot(self) -> frozenset[str]:
        named = self.layers or self.attention or self.mlp or self.speedup is not None
        return frozenset({"count"}) if named else frozenset()

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        windows = evidence.sampled(self.sample, program)
        layers = len(blocks_of(program.step))
        if self.count >= layers:
            raise PassError(f"{self.name}: count={self.count} leaves none of {layers} layers")

        parts, costs = in_question(cosines(program, windows), self.count), {}
        for number, part in enumerate(parts):
            evidence.progress("which layers are missed least", number / len(parts))
            costs[part] = loss(self._without([part]).run(program).program, windows)
        return self._without(sorted(parts, key=costs.__getitem__)[: self.count]).run(program)

    def _without(self, gone: Sequence[Part]) -> SkipLayers:
        """The pass that leaves out these layers."""
        named = tuple(sorted(layer for _, layer in gone))
        return self.model_copy(update={"layers": named})

    def run(self, program: Program) -> Outcome:
        if program.states:
            raise PassError(
                f"{self.name}: {program.name} has a cache, with states for the layers that it has "
                f"now: skip layers when the checkpoint is optimized"
            )
        fn = program.step.copy()
        blocks = blocks_of(fn)
        if not blocks:
            return Outcome(program, 0, f"{fn.name} has no graftwork.hidden marker of a block")
        parts = self._parts(sorted(blocks))
        if not parts:
            return Outcome(
                program, 0, "options name no layer: set layers, attention, mlp, speedup, count"
            )
        for layer, part in sorted(parts):
            _bypass(fn, layer, part, self.name)
        sweep(fn)
        return Outcome(self._planned(program, fn), len(parts))

    def _parts(self, there: Sequence[int]) -> list[tuple[int, str]]:
        """What goes: the layer, and "block", "attention" or "mlp". Errors: `PassError` for layers
        that are not there or named twice, and if none would be left."""
        if self.speedup is not None:
            kept = unified(there, self.speedup)
            return [(layer, "block") for layer in there if layer not in kept]
        sets = {"block": self.layers, "attention": self.attention, "mlp": self.mlp}
        parts = [(_number(n, there), part) for part, given in sets.items() for n in given]
        layers = [layer for layer, _ in parts]
        if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
            raise PassError(
                f"{self.name}: layer {twice[0]} is named twice in layers={list(self.layers)}, "
                f"attention={list(self.attention)}, mlp={list(self.mlp)}: a layer that loses both "
                f"its parts belongs into layers"
            )
        if len(self.layers) == len(there):
            raise PassError(f"{self.name}: all {len(there)} layers would go: keep one at least")
        return parts

    def _planned(self, program: Program, fn: Function) -> Program:
        """The program with the shorter step, and a plan for it."""
        full = self.prefill == "full"
        return (with_prefill(program, self.name) if full else program).with_function(fn)


def _number(layer: int, there: Sequence[int]) -> int:
    """A layer's number, which may be counted from the end. Errors: `PassError` for none."""
    if layer < 0 and -layer <= len(there):
        return there[layer]
    if layer not in there:
        raise PassError(
            f"{SkipLayers.name}: there is no layer {layer}; the model has the layers {there[0]} to "
            f"{there[-1]}"
        )
    return layer


def unified(layers: Sequence[int], speedup: float) -> frozenset[int]:
    """Of L layers those that stay, by the rule of Unified Layer Skipping. Errors: `PassError` for a
    speed-up that leaves fewer than the first and the last.

    >>> sorted(unified(range(8), 2.0))
    [0, 2, 4, 7]
    """
    count = int(len(layers) / speedup)
    if count < 2:
        raise PassError(
            f"skip_layers: speedup={speedup:g} leaves {count} of {len(layers)} layers; the rule "
            f"keeps the first and the last: ask for {len(layers) / 2:g} at most"
        )
    step = len(layers) // (count - 1)
    places = [0, len(layers) - 1, *(step * i for i in range(1, count - 1))]
    return frozenset(layers[place] for place in places)


def _bypass(fn: Function, layer: int, part: str, owner: str) -> None:
    """Let what reads the state behind a part read the one before it; lower layers went first."""
    markers = fn.calls(G.hidden.default)
    blocks, inner = blocks_of(fn), blocks_of(fn, "attention").get(layer)
    if part != "block" and inner is None:
        raise PassError(
            f"{owner}: layer {layer} has no state between its attention and its MLP (they run side "
            f"by side), so {part} cannot be left out alone: skip the whole layer (option layers)"
        )
    behind = inner if part == "attention" else blocks[layer]
    first = blocks[layer] if inner is None else inner
    before = inner if part == "mlp" else _before(fn, markers, first, owner)
    assert behind is not None and before is not None
    behind.replace_all_uses_with(before)
    gone = [behind] if part != "block" or inner is None else [behind, inner]
    for node in gone:
        _erase(fn, node)


def _before(
    fn: Function, markers: Sequence[torch.fx.Node], first: torch.fx.Node, owner: str
) -> torch.fx.Node:
    """The marker of the state that a layer reads, whose first marker is `first`."""
    place = markers.index(first)
    if not place:
        raise PassError(
            f"{owner}: {fn.name} has no graftwork.hidden marker before layer "
            f"{first.kwargs['layer']}, so that layer cannot be left out"
        )
    return markers[place - 1]


def _erase(fn: Function, marker: torch.fx.Node) -> None:
    """Remove a marker inside or behind a skipped part: taps there are refused."""
    source = marker.all_input_nodes[0]
    marker.replace_all_uses_with(source)
    fn.graph.erase_node(marker)
