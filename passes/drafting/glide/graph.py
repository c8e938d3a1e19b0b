"""Draft with a layer that attends to its own rows of the text and to the target's (GliDe).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After, of a target whose last layer is 5::

    draft func glide(tokens: i64[B,T], positions: i64[B,T], seen: i64[B,T],
        target.5.key: f32[B,G,N,D], target.5.value: f32[B,G,N,D], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ... {
      %x: f32[B,T,H] = ...                    the target's embeddings, and causal attention on them
      %y: f32[B,H,T,D] = graftwork.target_attention(%q, %target.5.key, %target.5.value, %seen,
          scale=0.125)
      %z: f32[B,T,H] = ...                    both added, a gated MLP added to that
    decode {
      draft = glide(function="glide", levels=5, block=5)

A decoder layer in the target's proportions over the embeddings of the text and of what is drafted,
with a cache of its own; between its attention and its MLP it attends to keys and values that the
target has in its cache anyway (Du et al., "GliDe with a CaPE", 2024). A token drafted k places
ahead sees the target's rows of the committed text, as the first one does. The head is its own, and
starts as the target's. Refuses what `draft_eagle` refuses, a layer of the target that has no
attention, and a target without any.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ....ir import Program
from ...engine.base import Outcome
from ...policies import builds
from ..decoder_layer import LayerShape, angles_at, attention, gated_mlp
from ..draft_pass import DraftHeadPass
from ..target_layer import TargetLayer
from . import GlideDraft

A = torch.ops.aten
NAME = "glide"


@builds(GlideDraft, "rollout", "decay")
class DraftGlide(DraftHeadPass):
    """layer: of the target, whose keys and values are read; none: the last that attends. The rest:
    see `DraftHeadPass` and the record."""

    layer: Annotated[int, Field(ge=0)] | None = None

    name: ClassVar[str] = "draft_glide"

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        target, shape = TargetLayer.of(graft, self.layer), LayerShape.of(graft.step, self.name, 0)
        tokens = graft.input("tokens", dtype=torch.int64)
        positions = graft.input("positions", dtype=torch.int64)
        layer = f"{NAME}.layers.0"
        x = graft.embed(tokens)
        normed = graft.rms_norm(x, f"{layer}.input_layernorm", shape.eps)
        read = attention(graft, normed, angles_at(graft, positions, shape.dim), layer, shape)
        read = graft.linear(read, f"{layer}.self_attn.o_proj", graft.hidden, bias=False)
        x = graft.call(A.add.Tensor, x, read)
        found = target.attend(graft, x, positions, f"{layer}.cross_attn")
        x = graft.call(A.add.Tensor, x, found)
        normed = graft.rms_norm(x, f"{layer}.post_attention_layernorm", shape.eps)
        x = graft.call(A.add.Tensor, x, gated_mlp(graft, normed, f"{layer}.mlp", shape.inner))
        last = graft.rms_norm(x, f"{NAME}.norm", shape.eps)
        logits = graft.head(last, f"{NAME}.lm_head.weight")
        outputs = dict(graft.picked(x, graft.candidates(logits, self.candidates)))
        del outputs["hidden"]  # the next token is told nothing but this one
        return Outcome(graft.drafted(outputs, self.made(function=NAME)), 1)
