"""Draft with a layer of two experts, whose last call predicts two tokens (Jakiro).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func jakiro(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], ahead f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10],
           ...
    func jakiro_ahead(hidden: f32[B,T,H]) -> draft_logits f32[B,T,1,V], ...
    decode {
      draft = ahead(first=cached(function="jakiro", levels=5, ...),
                    then=heads(function="jakiro_ahead", levels=1, ...), ...)

As `draft_eagle`, but for the layer's MLP: two gated ones, E_0 and E_1, as wide as the model, read
what the layer's norm gives, and so does a gate without a bias, g = G n of four numbers. The layer's
state is x + p_0 E_0(n) + p_1 E_1(n) with p = softmax(g_0, g_1). A second state, ``ahead``, is of
the same experts, the likelier one in contrast to the other: x + q_i E_i(n) - q_j E_j(n) with q =
softmax(g_2, g_3) and q_i >= q_j. The token after the next is predicted from that, so the last two
levels of a draft take one call (Huang et al., "Jakiro: Boosting Speculative Decoding with Decoupled
Multi-Head via MoE", 2025). New weights know nothing: train them with `graftwork train`. `weights`
may also be a published layer (``fc.*``, ``layers.0.*``), as safetensors. Refuses what `draft_eagle`
refuses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ....ir import Program
from ....ir.plan import CachedDraft, HeadsDraft
from ....ir.plan.bounds import Levels
from ...engine.base import Outcome
from ...engine.plan_edits import with_draft
from ...policies import builds
from ..decoder_layer import LayerShape, angles_at, decoder_layer, gated_mlp
from ..draft_pass import DraftHeadPass
from ..grafts import Graft
from . import AheadDraft

A = torch.ops.aten


@builds(AheadDraft, "later", "noise", aim="distribution")
class DraftJakiro(DraftHeadPass):
    """levels: tokens predicted ahead at most, the last one by the call of the one before it. inner:
    channels of an expert; None: the model's. bias: whether the linear layer has one. The
    rest: see `DraftHeadPass` and the record."""

    levels: Levels = Field(default=6, ge=2)
    inner: int | None = Field(default=None, ge=1)
    bias: bool = True

    name: ClassVar[str] = "draft_jakiro"
    unread: ClassVar[tuple[str, ...]] = ("embed_tokens.weight",)

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, "jakiro")
        # Its MLP is another one.
        shape = replace(LayerShape.of(graft.step, self.name, graft.hidden), inner=0)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        x = graft.fused(tokens, hidden, "jakiro.fc", bias=self.bias)
        angles = angles_at(graft, positions, shape.dim)
        name = "jakiro.layers.0"
        x = decoder_layer(graft, x, angles, name, shape)
        normed = graft.rms_norm(x, f"{name}.post_attention_layernorm", shape.eps)
        state, ahead = self._experts(graft, x, normed, f"{name}.mlp_moe")
        outputs = graft.picked(state, graft.candidates(graft.head(state), self.candidates))
        program = graft.done({**outputs, "ahead": ahead})
        program = self._later(program)
        trained = bool(self.weights)
        first = CachedDraft("jakiro", output, self.levels - 1, trained=trained)
        then = HeadsDraft("jakiro_ahead", 1, trained=trained)
        draft = self.made(first=first, then=then, trained=trained)
        return Outcome(with_draft(program, draft), 2)

    def _experts(
        self, graft: Graft, x: torch.fx.Node, normed: torch.fx.Node, name: str
    ) -> tuple[torch.fx.Node, torch.fx.Node]:
        """The state and the one ahead, [B,T,H]."""
        inner = self.inner or graft.hidden
        gate = graft.linear(normed, f"{name}.gate", 4, bias=False)
        experts = [gated_mlp(graft, normed, f"{name}.experts.{n}", inner) for n in range(2)]

        def weighed(start: int) -> list[torch.fx.Node]:
            """Both experts by the softmax of two numbers of the gate."""
            pair = graft.call(A.slice.Tensor, gate, 2, start, start + 2)
            shares = graft.call(A._softmax.default, pair, -1, False)
            parts = [graft.call(A.slice.Tensor, shares, 2, n, n + 1) for n in range(2)]
            return [graft.call(A.mul.Tensor, e, p) for e, p in zip(experts, parts, strict=True)]

        together = graft.call(A.add.Tensor, *weighed(0))
        first, second = (graft.call(A.slice.Tensor, gate, 2, n, n + 1) for n in (2, 3))
        contrast = graft.call(A.sub.Tensor, *weighed(2))
        turned = graft.call(A.neg.default, contrast)
        likelier = graft.call(A.gt.Tensor, first, second)
        contrast = graft.call(A.where.self, likelier, contrast, turned)
        state, ahead = (graft.call(A.add.Tensor, x, part) for part in (together, contrast))
        return state, ahead

    def _later(self, program: Program) -> Program:
        """The target's head on the state ahead."""
        graft = self.graft(program, "jakiro_ahead")
        logits = graft.head(graft.input("hidden", graft.hidden))
        return graft.done(
            graft.candidates(graft.call(A.unsqueeze.default, logits, 2), self.candidates)
        )
