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
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from ...ir import Program
from ...ir.plan import CachedDraft
from ..engine.base import Outcome
from ..policies import builds
from .decoder_layer import LayerShape, angles_at, decoder_layer
from .draft_pass import DraftHeadPass


@builds(CachedDraft, "rollout", "decay", aim="distribution")
class DraftEagle(DraftHeadPass):
    """bias: whether the linear layer has one. inner: channels of the layer's MLP, 0 for none; as
    many as the target's layers have unless said. The rest: see `DraftHeadPass` and the record."""

    bias: bool = True
    inner: int | None = Field(default=None, ge=0)

    name: ClassVar[str] = "draft_eagle"
    unread: ClassVar[tuple[str, ...]] = ("embed_tokens.weight",)

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, "eagle")
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        if self.inner is not None:
            shape = replace(shape, inner=self.inner)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        x = graft.fused(tokens, hidden, "eagle.fc", bias=self.bias)
        angles = angles_at(graft, positions, shape.dim)
        x = decoder_layer(graft, x, angles, "eagle.layers.0", shape)
        outputs = graft.picked(x, graft.candidates(graft.head(x), self.candidates))
        draft = self.made(function="eagle", output=output)
        return Outcome(graft.drafted(outputs, draft), 1)
