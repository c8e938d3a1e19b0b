"""Draft with parallel heads that attend to each other, on states adapted in stages.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (heads=3)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func amphista(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ...
    func amphista_heads(hidden: f32[B,T,H]) -> draft_logits f32[B,T,3,V], draft_tokens ...
    decode {
      draft = continued(first=cached(function="amphista", levels=1, ...),
                        then=heads(function="amphista_heads", levels=3, ...), ...)

The states of the target are adapted to drafting in two stages, each a decoder layer with a cache:
the first sees the target's features, the second what that makes of them beside the token that
followed. It gives the first token. For the later ones each head makes a state of its own from it,
x + SiLU(W x + b); attention in both directions among the heads of a place lets each know what the
others are about to say, and the target's frozen head turns all of them into logits at once (Li et
al., "Amphista: Bi-directional Multi-head Decoding for Accelerating LLM Inference", 2024). New
weights know nothing: train them with `graftwork train`. Refuses what `draft_eagle` refuses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Program, Sym
from ...ir.plan import CachedDraft, ContinuedDraft, HeadsDraft
from ..engine.base import Outcome
from ..policies import builds
from .decoder_layer import LayerShape, angles_at, decoder_layer
from .draft_pass import DraftHeadPass
from .grafts import Graft

A = torch.ops.aten
B, T = Sym("B"), Sym("T")


@builds(ContinuedDraft, "token", "feature", "later", "noise")
class DraftAmphista(DraftHeadPass):
    """heads: tokens predicted at once after the first. The rest: `DraftHeadPass`, the record."""

    heads: int = Field(default=3, ge=2)

    name: ClassVar[str] = "draft_amphista"

    def insert(self, program: Program) -> Outcome:
        shape = LayerShape.of(program.step, self.name, 0)
        program, output = self._adapted(program)
        program = self._parallel(program, shape)
        first = CachedDraft("amphista", output, 1)
        then = HeadsDraft("amphista_heads", self.heads)
        return Outcome(self.continued(program, first, then), 1 + self.heads)

    def _adapted(self, program: Program) -> tuple[Program, str]:
        graft = self.graft(program, "amphista")
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        angles = angles_at(graft, positions, shape.dim)
        x = decoder_layer(graft, hidden, angles, "amphista.stages.0", shape)
        x = graft.fused(tokens, x, "amphista.fc")
        x = decoder_layer(graft, x, angles, "amphista.stages.1", shape)
        outputs = graft.picked(x, graft.candidates(graft.head(x), self.candidates))
        return graft.done(outputs), output

    def _parallel(self, program: Program, shape: LayerShape) -> Program:
        graft = self.graft(program, "amphista_heads")
        hidden = graft.input("hidden", graft.hidden)
        own = [graft.res_block(hidden, f"amphista.heads.{n}") for n in range(self.heads)]
        x = graft.stacked(own)
        read = self._attended(graft, graft.rms_norm(x, "amphista.norm", shape.eps), shape)
        added = graft.linear(read, "amphista.o_proj", graft.hidden, bias=False, init="zeros")
        x = graft.call(A.add.Tensor, x, added)
        logits = [graft.head(graft.call(A.select.int, x, 2, n)) for n in range(self.heads)]
        return graft.done(graft.candidates(graft.stacked(logits), self.candidates))

    def _attended(self, graft: Graft, x: torch.fx.Node, shape: LayerShape) -> torch.fx.Node:
        """What the K heads of a place [B,T,K,H] hear from each other, [B,T,K,heads*dim]."""
        count, size = self.heads, shape.heads * shape.dim

        def split(kind: str, axis: int) -> torch.fx.Node:
            # Learned places tell the heads apart, which all start as the same state.
            place = graft.parameter(f"amphista.{kind}_place", count, size)
            y = graft.linear(x, f"amphista.{kind}_proj", size, bias=False)
            y = graft.call(A.add.Tensor, y, place)
            y = graft.call(A.reshape.default, y, [B, T, count, shape.heads, shape.dim])
            return graft.call(A.unsqueeze.default, y, axis)

        # [B,T,asking,asked,heads,dim]: K is small, so products are sums over it.
        query, key, value = split("q", 3), split("k", 2), split("v", 2)
        product = graft.call(A.mul.Tensor, query, key)
        scores = graft.call(A.sum.dim_IntList, product, [-1], True)
        scores = graft.call(A.mul.Tensor, scores, shape.dim**-0.5)
        weights = graft.call(A._softmax.default, scores, 3, False)
        heard = graft.call(A.mul.Tensor, weights, value)
        heard = graft.call(A.sum.dim_IntList, heard, [3])
        return graft.call(A.reshape.default, heard, [B, T, count, size])
