"""Let training change the target's own weights, by adapters of low rank that are merged into them.

Before::

    weight layers.0.q: f32[32,32]
    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] {
      %q: f32[B,T,32] = aten.linear(%n, @layers.0.q)

After (rank=16) the functions are the same, and the weight is computed from three, W f32[N,K], down
f32[16,K] and up f32[N,16]::

    layers.0.q = adapted(layers.0.q, tuned.layers.0.q.down, tuned.layers.0.q.up)

    y = (W + 2 up down) x           up = 0 at first: the target is as it was

All products between the embedding and the head have one, as in Dettmers et al., "QLoRA" (2023), but
a mixture's experts, which are no products of their own; so does every function that shares their
weights. Because the sum is a weight like any other, caches, fusions and quantization come to it as
they come to the model's own. What is decoded is the tuned target's text, to the token: the contract
is "tuned", and the report says by how much the target has changed where training measured it.
`graftwork train --tune` (`graftwork.train_target`) trains adapters and the plan's drafters at once.
Refuses weights of few bits, models without a marker, and a file whose adapters belong to other
products. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import zlib
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from ...ir import PassError, Program, TensorType, Weight, derivation, derive, type_of
from ...ir.plan.contract import Contract
from ...ir.rewrite.subgraph import beyond
from ..engine.base import Effect, Outcome, Pass, register
from .grafts import initial
from .target_change import measured, told_of
from .trained import ADAPTER, TrainedWeights, adapters_of

A, G = torch.ops.aten, torch.ops.graftwork

SCALE = 2
"""By which an adapter's product is multiplied."""


@register
class TuneTarget(Pass):
    """weights: a file of trained adapters, or the folder that training wrote; empty: untrained
    ones, which change nothing. rank: of the adapters; a file says its own.

    The others are training's. toward: what keeps the target as it was: "target", the divergence
    from the original; "text", the cross entropy of the text; "nothing", the drafts' loss alone.
    drafts: the weight of the drafts' loss beside that. warm: the share of the budget in which the
    drafters are trained alone. slower: the rate of the drafters' weights over that of the adapters.
    """

    weights: str = ""
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    toward: Literal["target", "text", "nothing"] = "target"
    drafts: Annotated[float, Field(gt=0, le=100)] = 0.2
    warm: Annotated[float, Field(ge=0, lt=1)] = 0.25
    slower: Annotated[float, Field(gt=0, le=1000)] = 4.0

    contract: ClassVar[Contract] = Contract.TUNED
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.HIDDEN_BASIS})
    brings: ClassVar[str] = "a tuned target"

    @property
    def files(self) -> tuple[str, ...]:
        return (self.weights,) if self.weights else ()

    def run(self, program: Program) -> Outcome:
        given = TrainedWeights(self.weights, self.name, program)
        if given and not any(name.startswith(ADAPTER) for name in given.names):
            raise PassError(
                f"{self.name}: {given.path} has no adapters: it was trained without changing the "
                f"target; give it to the draft pass alone, or tune (graftwork train --tune)"
            )
        names = self._products(program)
        if not names:
            return Outcome(program, 0, "the step has no product with a weight before its head")
        tuned = [self._tuned(program.weights[name], given) for name in names]
        if given:
            adapters = [part.name for weight in tuned for part in weight.inputs[1:]]
            given.check_all_used(adapters)
        made = program.replace(weights=program.weights.replacing(*tuned))
        return Outcome(made, len(names), remarks=(self._remark(given),))

    def _products(self, program: Program) -> list[str]:
        """Names of the weights of products between embedding and head, in order."""
        step = program.step
        few = [node for node in step.calls() if _of_few_bits(node.target)]
        if few:
            raise PassError(
                f"{self.name}: {program.name} holds weights in few bits (%{few[0].name}), which "
                f"cannot take small steps, nor adapters be merged into them: tune the checkpoint "
                f"that it was made from, and quantize what comes out"
            )
        markers = step.calls(G.hidden.default)
        if not markers:
            raise PassError(
                f"{self.name}: {program.name} has no graftwork.hidden marker, which says where the "
                f"layers end and the head begins"
            )
        head = beyond(step, {"hidden": markers[-1]}, ("logits",)).weights
        found: dict[str, None] = {}
        for node in step.calls(A.linear.default):
            weight = node.args[1]
            if isinstance(weight, torch.fx.Node) and weight.op == "get_attr":
                type = type_of(weight)
                if type.dtype.is_floating_point and str(weight.target) not in head:
                    found[str(weight.target)] = None
        return list(found)

    def _tuned(self, weight: Weight, given: TrainedWeights) -> Weight:
        rows, columns = _sizes(weight)
        down, up = (f"{ADAPTER}{weight.name}.{part}" for part in ("down", "up"))
        rank: int = self.rank
        if given and (stored := given.find(down)) is not None:
            dims = given.type_of(stored).dims
            rank = int(str(dims[0])) if len(dims) == 2 else rank  # others are refused below
        first = _fresh(down, weight, (rank, columns), "normal")
        last = _fresh(up, weight, (rows, rank), "zeros")
        parts = given.of(first), given.of(last)
        return derive(weight.name, weight.type, adapted, weight, *parts, scale=SCALE)

    def _remark(self, given: TrainedWeights) -> str:
        if not given:
            return (
                "the adapters are untrained and change nothing: tune (graftwork train --tune, or "
                f"graftwork.train_target), then set {self.name}.weights"
            )
        assert given.path is not None
        return told_of(measured(given.path))


def _of_few_bits(target: object) -> bool:
    return str(target).startswith("graftwork.quantized_")


def untuned(program: Program) -> Program:
    """The program of the original target: adapters that add nothing."""
    ups = [w for name, w in adapters_of(program).items() if name.endswith(".up")]
    zeros = [Weight.of(w.name, torch.zeros(_sizes(w), dtype=w.type.dtype)) for w in ups]
    return program.replace(weights=program.weights.renewed(*zeros))


def is_tuned(program: Program) -> bool:
    """Whether a program's target has adapters that change it."""
    return any(w.load().any() for name, w in adapters_of(program).items() if name.endswith(".up"))


def tuning_of(program: Program) -> TuneTarget | None:
    """The pass that put adapters into a program, with its options; None if none did."""
    for record in program.provenance:
        if record.name == TuneTarget.name and record.matches:
            return TuneTarget.model_validate(dict(record.options))
    return None


def _fresh(name: str, weight: Weight, shape: tuple[int, ...], init: str) -> Weight:
    """An untrained adapter of a weight."""
    dtype, seed = weight.type.dtype, zlib.crc32(name.encode())
    type = TensorType(dtype, shape)
    return derive(name, type, initial, init=init, shape=shape, dtype=dtype, seed=seed)


def _sizes(weight: Weight) -> list[int]:
    return [int(str(dim)) for dim in weight.type.dims]


@derivation
def adapted(
    weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """A weight [N,K] and its adapter down [R,K], up [N,R]: W + scale up down, in float32 and back
    in the weight's dtype."""
    return (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
