"""Draft with heads that join state and token anew at each level, after a layer like the target's.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (heads=4)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden f32[B,T,H]
    func clover(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ...
    func clover_1(tokens: i64[B,T], state: f32[B,T,H]) -> state f32[B,T,H], draft_logits ...
    ...
    decode {
      draft = continued(first=cached(function="clover", levels=1, ...),
                        then=recurrent(functions=("clover_1", ...), ...), ...)

At each level a block adds to the state h what the token e says: values of e, each head's weighed by
the cosine between its query, made of h, and its key, made of e. Then W [h; e] is the next state,
and the target's frozen norm and head turn it into logits. At the first level, which has the
target's own states of the text, layers that start as copies of the target's last one come between
the two (augmenting layers), with a cache (Xiao et al., "Clover-2: Accurate Inference for Regressive
Lightweight Speculative Decoding", 2024; the first Clover mixes the drafted tokens by an attention
decoder instead). New weights know little: train them with `graftwork
train`. Refuses what `draft_eagle` refuses, and a step whose last layer cannot be copied.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Program, Sym
from ...ir.plan import CachedDraft, RecurrentDraft
from ...ir.plan.bounds import Factor
from ..engine.base import Outcome, register
from .copied_layer import copied_layer
from .decoder_layer import LayerShape
from .draft_pass import DraftPass
from .grafts import Graft

A = torch.ops.aten
B, T = Sym("B"), Sym("T")
LEAST = 1e-6
"""Keeps the cosine of nothing finite."""


@register
class DraftClover(DraftPass):
    """heads: tokens predicted. layers: augmenting ones. The rest: see `DraftPass`."""

    heads: int = Field(default=4, ge=2)
    layers: int = Field(default=1, ge=1)
    decay: Factor = 0.7

    name: ClassVar[str] = "draft_clover"

    def insert(self, program: Program) -> Outcome:
        """Graft layer and heads on. See the module docstring."""
        shape = LayerShape.of(program.step, self.name, 0)
        program, output = self._first(program, shape)
        for level in range(1, self.heads):
            program = self._level(program, level, shape)
        functions = tuple(f"clover_{level}" for level in range(1, self.heads))
        first = CachedDraft("clover", output, 1)
        then = RecurrentDraft(functions, self.heads - 1, self.decay)
        return Outcome(self.continued(program, first, then, noise=False), self.heads)

    def _first(self, program: Program, shape: LayerShape) -> tuple[Program, str]:
        graft = Graft(program, self.name, "clover", self.weights)
        output = graft.tap()
        tokens, positions, hidden = graft.text_inputs()
        e = graft.embed(tokens)
        x = self._heard(graft, hidden, e, "clover.0", shape)
        for layer in range(self.layers):
            x = copied_layer(graft, x, positions, f"clover.layers.{layer}")
        state = self._joined(graft, x, e, "clover.0")
        logits = graft.head(graft.norm(state))
        outputs = graft.picked(state, graft.candidates(logits, self.candidates))
        return graft.done(outputs), output

    def _level(self, program: Program, level: int, shape: LayerShape) -> Program:
        name = f"clover.{level}"
        graft = Graft(program, self.name, f"clover_{level}", self.weights)
        tokens = graft.input("tokens", dtype=torch.int64)
        before = graft.input("state", graft.hidden)
        e = graft.embed(tokens)
        state = self._joined(graft, self._heard(graft, before, e, name, shape), e, name)
        logits = graft.head(graft.norm(state))
        return graft.done({"state": state, **graft.candidates(logits, self.candidates)})

    def _joined(self, graft: Graft, x: torch.fx.Node, e: torch.fx.Node, name: str) -> torch.fx.Node:
        """W [x; e], at first x."""
        both = graft.concat([x, e])
        return graft.linear(both, f"{name}.joint", graft.hidden, bias=False, init="eye")

    def _heard(
        self, graft: Graft, x: torch.fx.Node, e: torch.fx.Node, name: str, shape: LayerShape
    ) -> torch.fx.Node:
        """x and what the attention hears of e, at first x alone."""
        own = graft.rms_norm(x, f"{name}.norm_state", shape.eps)
        told = graft.rms_norm(e, f"{name}.norm_token", shape.eps)

        def heads(source: torch.fx.Node, kind: str) -> torch.fx.Node:
            y = graft.linear(source, f"{name}.{kind}_proj", shape.heads * shape.dim, bias=False)
            return graft.call(A.reshape.default, y, [B, T, shape.heads, shape.dim])

        def dot(a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
            product = graft.call(A.mul.Tensor, a, b)
            return graft.call(A.sum.dim_IntList, product, [-1], True)

        query, key, value = heads(own, "q"), heads(told, "k"), heads(told, "v")
        sizes = graft.call(A.mul.Tensor, dot(query, query), dot(key, key))
        scale = graft.call(A.rsqrt.default, graft.call(A.add.Tensor, sizes, LEAST))
        gate = graft.call(A.mul.Tensor, dot(query, key), scale)
        read = graft.call(A.mul.Tensor, value, gate)
        read = graft.call(A.reshape.default, read, [B, T, shape.heads * shape.dim])
        added = graft.linear(read, f"{name}.o_proj", graft.hidden, bias=False, init="zeros")
        return graft.call(A.add.Tensor, x, added)
