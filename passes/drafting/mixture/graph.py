"""Draft with layers over what all layers of the target keep of the text (Mixture of Attentions).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After, of a target of layers 0 to 5::

    draft func mixture_memory(positions: i64[B,T], target.0.key: f32[B,G,N,D], target.0.value, ...)
        -> mixture.memory.0.key f32[B,G,T,D], mixture.memory.0.value f32[B,G,T,D] {
      %r: f32[B,G,T,D] = graftwork.take_rows(%target.0.key, %places)
      %x: f32[B,T,6,W] = ...                          a token's rows of all layers, W = 2 * G * D
      %y: f32[B,T,W] = ...                            a decoder layer over the layers, and the mean
    draft func mixture(tokens: i64[B,T], positions: i64[B,T], seen: i64[B,T],
        mixture.memory.0.key: f32[B,G,N,D], mixture.memory.0.value, select: i64[B,S])
        -> draft_logits f32[B,S,V], draft_tokens i64[B,S,10], draft_scores f32[B,S,10]
    decode {
      draft = mixture(function="mixture", entry="mixture_memory", near="hidden.normed", ...)

The target's state is all that its layers keep of a token, not one of them: a layer whose attention
runs over the layers makes a row of that, once for each committed token (layer self-attention). A
decoder layer over the token's embeddings and one whose attention asks those rows make the state
that the target's head reads; drafted tokens only ask, so all of a draft sees the same rows, which
training shows in blocks (Zimmer et al., "Mixture of Attentions For Speculative Decoding", 2025).
With `inference` the state is one that the target's own last layers take, which are then run on it
(target layer inference). Refuses what `draft_eagle` refuses, layers of the target whose rows have
several widths, and more layers to run than there are.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
import torch.fx
from pydantic import Field

from ....ir import PassError, Program, Sym, TensorType, arguments, derive, type_of
from ...engine.base import Outcome
from ...policies import builds
from ..decoder_layer import LayerShape, angles, angles_at, decoder_layer, gated_mlp, next_layer
from ..draft_pass import DraftHeadPass
from ..grafts import Graft
from ..target_layer import ROWS, TargetLayer, asked
from . import MixtureDraft

A, G = torch.ops.aten, torch.ops.graftwork
B, T = Sym("B"), Sym("T")
NAME, ENTRY = "mixture", "mixture_memory"
MEMORY = f"{NAME}.memory.0"


@builds(MixtureDraft, "rollout", "decay", aim="distribution")
class DraftMixture(DraftHeadPass):
    """inference: how many of the target's last layers run on the draft's states. The rest: see
    `DraftHeadPass` and the record."""

    inference: Annotated[int, Field(ge=0, le=8)] = 0

    name: ClassVar[str] = "draft_mixture"

    def insert(self, program: Program) -> Outcome:
        program = self._memory(program)
        graft = self.graft(program, NAME)
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        tokens = graft.input("tokens", dtype=torch.int64)
        positions = graft.input("positions", dtype=torch.int64)
        turns = angles_at(graft, positions, shape.dim)
        x, layer = graft.embed(tokens), f"{NAME}.layers.0"
        normed = graft.rms_norm(x, f"{layer}.input_layernorm", shape.eps)
        x = decoder_layer(graft, x, turns, layer, shape, source=normed)
        layer = f"{NAME}.layers.1"
        type = TensorType(graft.dtype, (B, shape.groups, ROWS, shape.dim))
        rows = [graft.fn.add_input(f"{MEMORY}.{part}", type) for part in ("key", "value")]
        normed = graft.rms_norm(x, f"{layer}.input_layernorm", shape.eps)
        found = asked(graft, normed, (rows[0], rows[1]), shape.heads, turns, f"{layer}.cross_attn")
        x = graft.call(A.add.Tensor, x, found)
        normed = graft.rms_norm(x, f"{layer}.post_attention_layernorm", shape.eps)
        x = graft.call(A.add.Tensor, x, gated_mlp(graft, normed, f"{layer}.mlp", shape.inner))
        near, before, own = graft.tap_normed(), None, x
        if self.inference:
            before, x = self._inferred(graft, x, positions)
        last = graft.norm(x) if self.inference else x
        outputs = dict(graft.picked(x, graft.candidates(graft.head(last), self.candidates)))
        del outputs["hidden"]  # the next token is told nothing but this one
        outputs["feature"] = graft.norm(x) if self.inference else x
        if self.inference:
            outputs["before"] = own
        draft = self.made(function=NAME, entry=ENTRY, near=near, before=before)
        return Outcome(graft.drafted(outputs, draft), 1)

    def _memory(self, program: Program) -> Program:
        """The function that makes a row of a token's rows in all layers."""
        graft = self.graft(program, ENTRY)
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        positions = graft.input("positions", dtype=torch.int64)
        layers = TargetLayer.every(graft)
        rows = [self._rows_of(graft, layer, positions) for layer in layers]
        widths = {type_of(row).dims[-1] for row in rows}
        if len(widths) > 1:
            raise PassError(
                f"{self.name}: the target's layers keep rows of several widths, "
                f"{', '.join(map(str, sorted(map(str, widths))))}: expected one"
            )
        x = self._across_layers(graft, graft.stacked(rows), layers[-1], shape.eps)
        x = graft.linear(x, f"{NAME}.joined", graft.hidden)
        layer = f"{NAME}.layers.1"
        normed = graft.rms_norm(x, f"{layer}.input_layernorm", shape.eps)
        outputs = {}
        for part in ("key", "value"):
            name = f"{layer}.cross_attn.{part[0]}_proj"
            y = graft.linear(normed, name, shape.groups * shape.dim, bias=False)
            y = graft.call(A.reshape.default, y, [B, T, shape.groups, shape.dim])
            y = graft.call(A.permute.default, y, [0, 2, 1, 3])
            if part == "key":
                y = angles_at(graft, positions, shape.dim).rotate(graft, y)
            outputs[f"{MEMORY}.{part}"] = y
        return graft.done(outputs)

    def _rows_of(self, graft: Graft, layer: TargetLayer, positions: torch.fx.Node) -> torch.fx.Node:
        """What a layer of the target keeps of the tokens at these positions, [B,T,W]."""
        parts = []
        for part in ("key", "value"):
            rows = layer.rows(graft, part)
            groups, dim = (int(str(type_of(rows).dims[axis])) for axis in (1, 3))
            places = graft.call(A.unsqueeze.default, positions, 1)
            places = graft.call(A.expand.default, places, [-1, groups, -1])
            taken = graft.call(G.take_rows.default, rows, places)
            taken = graft.call(A.permute.default, taken, [0, 2, 1, 3])
            parts.append(graft.call(A.reshape.default, taken, [B, T, groups * dim]))
        return graft.concat(*parts)

    def _across_layers(
        self, graft: Graft, x: torch.fx.Node, last: TargetLayer, eps: float
    ) -> torch.fx.Node:
        """The mean [B,T,W] of a token's rows [B,T,L,W] after a decoder layer over them, whose
        places are the numbers of their layers."""
        layer = f"{NAME}.layer_attention"
        count, wide = (int(str(dim)) for dim in type_of(x).dims[2:])
        heads = int(str(type_of(arguments(last.attention)["k"]).dims[1]))
        dim = wide // heads
        x = graft.call(A.reshape.default, x, [-1, count, wide])
        normed = graft.rms_norm(x, f"{layer}.input_layernorm", eps)
        tables = [self._turns(graft, kind, count, dim // 2) for kind in ("cos", "sin")]

        def split(kind: str) -> torch.fx.Node:
            y = graft.linear(normed, f"{layer}.self_attn.{kind}_proj", heads * dim, bias=False)
            y = graft.call(A.reshape.default, y, [-1, count, heads, dim])
            y = graft.call(A.permute.default, y, [0, 2, 1, 3])
            return y if kind == "v" else graft.call(G.rotary.default, y, *tables)

        query, key, value = split("q"), split("k"), split("v")
        turned = graft.call(A.permute.default, key, [0, 1, 3, 2])
        scores = graft.call(A.matmul.default, query, turned)
        scores = graft.call(A.mul.Tensor, scores, dim**-0.5)
        weights = graft.call(A._softmax.default, scores, -1, False)
        read = graft.call(A.matmul.default, weights, value)
        read = graft.call(A.permute.default, read, [0, 2, 1, 3])
        read = graft.call(A.reshape.default, read, [-1, count, heads * dim])
        read = graft.linear(read, f"{layer}.self_attn.o_proj", wide, bias=False)
        x = graft.call(A.add.Tensor, x, read)
        normed = graft.rms_norm(x, f"{layer}.post_attention_layernorm", eps)
        x = graft.call(A.add.Tensor, x, gated_mlp(graft, normed, f"{layer}.mlp", 2 * wide))
        return graft.call(A.reshape.default, graft.call(A.mean.dim, x, [1]), [B, T, wide])

    def _turns(self, graft: Graft, kind: str, rows: int, half: int) -> torch.fx.Node:
        """Cosines or sines [1,L,R] of the layers' places."""
        name = f"{NAME}.layer_attention.{kind}"
        options: dict[str, Any] = {"kind": kind, "rows": rows, "half": half, "dtype": graft.dtype}
        made = derive(name, TensorType(graft.dtype, (rows, half)), angles, **options)
        return graft.call(A.unsqueeze.default, graft.constant(made), 0)

    def _inferred(
        self, graft: Graft, x: torch.fx.Node, positions: torch.fx.Node
    ) -> tuple[str, torch.fx.Node]:
        """The step's output that x stands for, and x [B,T,H] after the target's last layers, which
        attend to what they make of the draft's states."""
        numbers = list(graft.blocks)
        if self.inference >= len(numbers):
            raise PassError(
                f"{self.name}: inference={self.inference} of the target's {len(numbers)} layers: "
                f"expected fewer than there are"
            )
        start = numbers[-1 - self.inference]
        name, had = graft.tap(start), set(graft.fn)
        given: dict[Any, torch.fx.Node] = {
            graft.blocks[start]: x,
            graft.step.input("positions"): positions,
        }
        y = graft.copy(given, graft.markers[-1].args[0])
        for node in graft.fn.calls(G.attention.default):
            if node not in had:
                node.update_kwarg("layer", next_layer(graft))
        return name, graft.unmarked(y)
