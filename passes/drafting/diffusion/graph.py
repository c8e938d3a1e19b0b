"""Draft with layers that denoise a block of masks behind the cached text (block diffusion).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After, with a layer of two shown (levels=8, steps=2, depth=2)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func diffusion(tokens: i64[B,T], positions: i64[B,T], select: i64[B,S])
        -> draft_logits f32[B,S,V], draft_tokens i64[B,S,10], draft_scores f32[B,S,10] {
      %x: f32[B,T,H] = ...                    the embedding, or @diffusion.mask for the id V
      %y: f32[B,H,T,D] = graftwork.attention(q(%x), k(%x), v(%x), layer=8, scale=0.125)
    decode {
      draft = diffusion(function="diffusion", levels=8, steps=2, ...)

The layers start as copies of the target's first ones and, the last of them, of its last, so that
they can read and write when they learn to look both ways, as diffusion models are made of
autoregressive ones (Gong et al., "Scaling Diffusion Language Models via Adaptation from
Autoregressive Models", 2024). They read the target's embeddings; a copy of its final norm and its
head make of a mask the prediction for its own place. Tokens of the text see what precedes them, so
their rows are made once; a block's tokens and masks see the text and each other, before and behind
(Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
Models", 2025), and are denoised as the folder's module says (Christopher et al., "Speculative
Diffusion Decoding", 2024). Nothing of it has seen a mask: train it with `graftwork train`. Refuses
what `draft_clover` refuses, more layers than the target has, and more steps than levels.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx

from ....ir import PassError, Program
from ....ir.plan.bounds import Levels
from ...engine.base import Outcome
from ...policies import builds
from ..copied_layer import copied_layer, copied_norm, layers_of
from ..draft_pass import DraftHeadPass
from ..grafts import Graft
from . import DiffusionDraft

A = torch.ops.aten
NAME, MASK = "diffusion", "diffusion.mask"


@builds(DiffusionDraft, "rollout", "token", "decay")
class DraftDiffusion(DraftHeadPass):
    """depth: draft layers. The rest: see `DraftHeadPass` and the record."""

    depth: Levels = 2

    name: ClassVar[str] = "draft_diffusion"

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        have = len(layers_of(graft))
        if self.depth > have:
            raise PassError(
                f"{self.name}: depth={self.depth} is more than the {have} layers of {program.name} "
                f"that its layers start as"
            )
        tokens = graft.input("tokens", dtype=torch.int64)
        positions = graft.input("positions", dtype=torch.int64)
        x = self._embedded(graft, tokens)
        for index in range(self.depth):
            which = index if index < self.depth - 1 else -1
            x = copied_layer(graft, x, positions, f"{NAME}.layers.{index}", which)
        logits = graft.head(copied_norm(graft, x, NAME))
        outputs = dict(graft.picked(x, graft.candidates(logits, self.candidates)))
        del outputs["hidden"]
        draft = self.made(function=NAME, token=graft.vocab, weight=MASK)
        return Outcome(graft.drafted(outputs, draft), 1)

    def _embedded(self, graft: Graft, tokens: torch.fx.Node) -> torch.fx.Node:
        """The embeddings [B,T,H] of tokens, masks among them."""
        known = graft.embed(graft.call(A.clamp.default, tokens, 0, graft.vocab - 1))
        masked = graft.call(A.eq.Scalar, tokens, graft.vocab)
        masked = graft.call(A.unsqueeze.default, masked, -1)
        return graft.call(A.where.self, masked, graft.parameter(MASK, 1, graft.hidden), known)
