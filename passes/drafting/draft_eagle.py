"""Draft with a layer of its own that predicts the target's next features (EAGLE).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func eagle(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ...
    decode {
      draft = cached(function="eagle", output="hidden.normed", levels=5, ...)

A feature is what the target's language-model head reads. Token t + 1 together with the feature
after token t goes through a linear layer 2H -> H and one decoder layer without input norm, which
gives the feature after token t + 1; the target's frozen head turns it into logits, and below the
first level of a tree it stands in for the target's own (Li et al., "EAGLE", 2024; drawn as a tree
of the likeliest nodes: "EAGLE-2", 2024). `insert_kv_cache` and `accept_trees` treat the function as
they treat the step. New layers know nothing: train them with `graftwork train`. `weights` may also
be a published layer (``fc.*``, ``layers.0.*``), as safetensors. Refuses programs without a marker,
an embedding table or a language-model head, or with a function of that name, and
published tensors that do not fit, by name.

Two options are another paper's (Gui et al., "Boosting Lossless Speculative Decoding via Feature
Sampling and Partial Alignment Distillation", 2024). ``sampled``: a feature leaves open which token
was drawn, so the token e chooses among the inner channels of a gated MLP on z = fc([e; h])::

    %z: f32[B,T,H] = aten.add.Tensor(%z, down(silu(gate(%e)) * up(norm(%z))))

``apart``: the layer's MLP makes two states of its 2H outputs [a; b]. The head reads x + a; x + b is
the feature that training aligns with the target's and that the next level reads, so that a likeness
of features and a sureness of tokens do not pull at one state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import CachedDraft
from ..engine.base import Outcome
from ..policies import builds
from .decoder_layer import Angles, LayerShape, angles_at, decoder_layer, gated_mlp
from .draft_pass import DraftHeadPass
from .grafts import Graft

A = torch.ops.aten
LAYER = "eagle.layers.0"


@builds(CachedDraft, "rollout", "decay", aim="distribution")
class DraftEagle(DraftHeadPass):
    """bias: whether the linear layer has one. inner: channels of the layer's MLP, 0 for none; as
    many as the target's layers have unless said. sampled, apart: see the module docstring. The
    rest: see `DraftHeadPass` and the record."""

    bias: bool = True
    inner: int | None = Field(default=None, ge=0)
    sampled: bool = False
    apart: bool = False

    name: ClassVar[str] = "draft_eagle"
    unread: ClassVar[tuple[str, ...]] = ("embed_tokens.weight",)

    def insert(self, program: Program) -> Outcome:
        if self.inner == 0 and (self.sampled or self.apart):
            raise PassError(
                f"{self.name}: inner=0 leaves no MLP, which sampled and apart need: leave inner out"
            )
        graft = self.graft(program, "eagle")
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        if self.inner is not None:
            shape = replace(shape, inner=self.inner)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        if self.sampled:
            x = self._sampled(graft, graft.embed(tokens), hidden, shape)
        else:
            x = graft.fused(tokens, hidden, "eagle.fc", bias=self.bias)
        angles = angles_at(graft, positions, shape.dim)
        if self.apart:
            read, feature = self._apart(graft, x, angles, shape)
        else:
            read = feature = decoder_layer(graft, x, angles, LAYER, shape)
        outputs = graft.picked(read, graft.candidates(graft.head(read), self.candidates))
        draft = self.made(function="eagle", output=output)
        return Outcome(graft.drafted({**outputs, "hidden": feature}, draft), 1)

    def _sampled(
        self, graft: Graft, e: torch.fx.Node, hidden: torch.fx.Node, shape: LayerShape
    ) -> torch.fx.Node:
        """What of the features [B,T,H] the tokens with embeddings e choose."""
        x = graft.linear(graft.concat(e, hidden), "eagle.fc.fc", graft.hidden, bias=self.bias)
        normed = graft.rms_norm(x, "eagle.fc.post_attention_layernorm", shape.eps)
        chosen = gated_mlp(graft, normed, "eagle.fc.mlp", shape.inner, by=e)
        return graft.call(A.add.Tensor, x, chosen)

    def _apart(
        self, graft: Graft, x: torch.fx.Node, angles: Angles, shape: LayerShape
    ) -> tuple[torch.fx.Node, torch.fx.Node]:
        """The layer's states [B,T,H] for the head and for the next level."""
        x = decoder_layer(graft, x, angles, LAYER, replace(shape, inner=0))
        normed = graft.rms_norm(x, f"{LAYER}.post_attention_layernorm", shape.eps)
        size = graft.hidden
        both = gated_mlp(graft, normed, f"{LAYER}.mlp", shape.inner, outputs=2 * size)
        parts = graft.call(A.split_with_sizes.default, both, [size, size], -1)
        read, feature = (
            graft.call(A.add.Tensor, x, graft.fn.item(parts, place)) for place in range(2)
        )
        return read, feature
