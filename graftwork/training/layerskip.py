"""LayerSkip: training of a target for early exit.

Layers are dropped at random per sample, later layers more often:

    x[l+1] = x[l] + M(p[l]) f[l](x[l])          p[l] = dropout * S(t) * D(l)
    D(l) = exp(l ln 2 / (L - 1)) - 1            S(t) = 1, or exp(t ln 2 / (T - 1)) - 1 from scratch

M(p) is 0 with probability p, else 1. Next tokens are predicted from several depths through the
model's last norm and head, with weights that grow with the depth:

    loss = sum e[l] c(t, l) CE(head(x[l+1]), text) / sum e[l] c(t, l)
    e[l] = scale * (0 + 1 + ... + l)            but e[L-1] = L - 1 + scale * (0 + ... + (L - 2))

The curriculum c(t, l) selects depths at step t: every R-th, shifted by one each step ("rotate"), or
from the last downwards, one more each T / 2L steps ("gradual"). The last is always selected.

The objective rewrites the program, so it applies to every model that can be traced.

Source: Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding"
(2024), sections 4.1.1 and 4.1.2, equations 1 to 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.fx
import torch.nn.functional as F

from ..ir import Function, InputError, Program, TensorType, UnsupportedError, type_of
from ..ir.rewrite.subgraph import beyond, tables_of
from .net import Net

A, G = torch.ops.aten, torch.ops.graftwork

Curriculum = Literal["rotate", "gradual", "all"]


@dataclass(frozen=True)
class LayerSkip:
    """Parameters of the objective. dropout: probability of dropping the last layer. scale: of the
    losses before the last layer, 0..1. every: R of "rotate". scratch: dropout rises from 0 during
    training, for untrained models."""

    dropout: float = 0.1
    scale: float = 0.2
    curriculum: Curriculum = "rotate"
    every: int = 8
    scratch: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1 or not 0 <= self.scale <= 1:
            raise InputError(
                f"dropout={self.dropout}, scale={self.scale}: expected a dropout of at least 0 and "
                f"below 1, and a scale in 0..1"
            )
        if self.every < 1 or self.curriculum not in ("rotate", "gradual", "all"):
            raise InputError(
                f"curriculum={self.curriculum!r}, every={self.every}: expected 'rotate', 'gradual' "
                f"or 'all', and every of at least 1"
            )

    def drops(self, layers: int, share: float) -> list[float]:
        """Drop probabilities of layers. share: of the training so far, 0..1.

        >>> [round(p, 3) for p in LayerSkip(dropout=0.5).drops(3, 0.0)]
        [0.0, 0.207, 0.5]
        """
        rising = math.expm1(share * math.log(2)) if self.scratch else 1.0
        span = max(layers - 1, 1)
        return [
            self.dropout * rising * math.expm1(layer * math.log(2) / span)
            for layer in range(layers)
        ]

    def asked(self, layers: int, step: int, share: float) -> list[int]:
        """Layers (from 0) whose outputs are trained at a step.

        >>> LayerSkip(every=3).asked(8, 4, 0.0), LayerSkip(curriculum="gradual").asked(4, 9, 0.3)
        ([1, 4, 7], [1, 2, 3])
        """
        last = layers - 1
        if self.curriculum == "rotate":
            chosen = [layer for layer in range(last) if layer % self.every == step % self.every]
        elif self.curriculum == "gradual":
            chosen = list(range(max(0, last - int(share * 2 * layers)), last))
        else:
            chosen = list(range(last))
        return [*chosen, last]

    def shares(self, layers: int, asked: list[int]) -> dict[int, float]:
        """Loss weights of these layers, with sum 1.

        >>> LayerSkip(scale=1.0).shares(4, [1, 3])
        {1: 0.14285714285714285, 3: 0.8571428571428571}
        """
        last = layers - 1
        raw = {layer: self.scale * layer * (layer + 1) / 2 for layer in asked}
        raw[last] = last + self.scale * (last - 1) * last / 2
        total = sum(raw.values()) or 1.0
        return {layer: value / total for layer, value in raw.items() if value} or {last: 1.0}


class Losses(NamedTuple):
    """total: to minimise. by_depth: mean cross entropy, nats per token, by number of layers."""

    total: torch.Tensor
    by_depth: dict[int, float]


class ExitTrainer:
    """Trains a traced program's weights by `LayerSkip`. parameters: names of trained weights.
    Errors: `UnsupportedError` for programs without markers of several layers."""

    def __init__(
        self, program: Program, objective: LayerSkip, parameters: set[str], device: torch.device
    ) -> None:
        self.objective, self.device = objective, device
        step = program.step
        blocks = [node for node in step.calls(G.hidden.default) if node.kwargs["point"] == "block"]
        self.layers = len(blocks)
        if self.layers < 2:
            raise UnsupportedError(
                f"{program.name}: expected a model of several layers, found {self.layers}"
            )
        tables = tables_of(step)
        trained = [name for name in sorted(step.weights) if name in parameters - tables]
        self.net = Net(program, trained, device)
        self.head = beyond(step, {"hidden": step.calls(G.hidden.default)[-1]}, ("logits",))
        self.body = with_dropout(step)

    def loss(self, tokens: torch.Tensor, step: int, share: float, seed: int) -> Losses:
        """The loss on windows of text i64[N,T]."""
        objective, count = self.objective, self.layers
        asked = objective.asked(count, step, share)
        shares = objective.shares(count, asked)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chance = torch.rand(len(tokens), count, generator=generator)
        kept = chance >= torch.tensor(objective.drops(count, share))
        states = self._states(tokens[:, :-1], kept.float()[:, None], tuple(shares))
        total, by_depth = torch.zeros((), device=self.device), {}
        for layer, weight in shares.items():
            loss = self._cross_entropy(states[layer], tokens[:, 1:])
            by_depth[layer + 1] = float(loss.detach())
            total = total + weight * loss
        return Losses(total, by_depth)

    @torch.no_grad()
    def losses(self, tokens: torch.Tensor) -> list[float]:
        """Mean cross entropy of windows i64[N,T] at every depth, in nats per token, no dropout."""
        kept, every = torch.ones(len(tokens), 1, self.layers), tuple(range(self.layers))
        states = self._states(tokens[:, :-1], kept, every)
        return [float(self._cross_entropy(states[layer], tokens[:, 1:])) for layer in every]

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The current trained weights by name."""
        return {name: self.net.tensors[name].detach() for name in self.net.trained}

    def _states(
        self, tokens: torch.Tensor, kept: torch.Tensor, layers: tuple[int, ...]
    ) -> dict[int, torch.Tensor]:
        """Residual streams f32[N,T,H] after layers. kept: f32[N,T,L], or f32[N,1,L] for all of a
        window's tokens; 0 for dropped layers."""
        names = tuple(f"hidden.{layer}" for layer in layers)
        kept = kept.expand(-1, tokens.shape[1], -1)
        inputs = {"tokens": tokens.to(self.device), "kept": kept.to(self.device)}
        made = self.net.outputs(self.body, names, inputs)
        return {layer: made[name] for layer, name in zip(layers, names, strict=True)}

    def _cross_entropy(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = self.net.outputs(self.head, ("logits",), {"hidden": hidden})["logits"]
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.to(self.device).flatten())


def with_dropout(step: Function) -> Function:
    """The step with an input ``kept`` f[B,T,L] (0: the layer is dropped) and the residual stream
    after each layer as outputs ``hidden.0`` to ``hidden.L-1``."""
    fn = step.copy()
    fn.name = f"{step.name}.dropped"
    markers = fn.calls(G.hidden.default)
    blocks = [node for node in markers if node.kwargs["point"] == "block"]
    # The input of layer l: the marker after layer l - 1; for layer 0 the embedding's.
    before = [markers[0], *blocks[:-1]]
    if markers[0] is blocks[0]:
        raise UnsupportedError(f"{step.name} has no graftwork.hidden marker before its first layer")
    stream = type_of(markers[0])
    kept = fn.add_input("kept", TensorType(stream.dtype, (*stream.dims[:2], len(blocks))))
    for index, (marker, earlier) in enumerate(zip(blocks, before, strict=True)):
        made = marker.all_input_nodes[0]
        with fn.graph.inserting_before(marker):
            change = fn.call(A.sub.Tensor, made, earlier)
            share = fn.call(A.slice.Tensor, kept, 2, index, index + 1)
            scaled = fn.call(A.mul.Tensor, change, share)
            mixed = fn.call(A.add.Tensor, earlier, scaled)
        marker.replace_input_with(made, mixed)
    outputs = {f"hidden.{index}": marker for index, marker in enumerate(blocks)}
    fn.set_outputs(outputs)
    return fn
