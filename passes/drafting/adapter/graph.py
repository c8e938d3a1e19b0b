"""Draft with the target's own first layers and a small layer that stands in for the others.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] {
      %h: f32[B,T,H] = graftwork.hidden(%x, layer=1, point="block")

After (exit=2)::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], hidden.1 f32[B,T,H] { ... }
    draft func adapter(positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> draft_logits f32[B,S,V], draft_tokens, ...
    decode {
      draft = adapted_exit(function="adapter", output="hidden.1", exit=2, levels=6)

A drafted token runs through the first layers, and an adapter continues its state h, as the other
layers would: x = h + attention(norm(h)) without an MLP, a norm that starts as the target's final
one, and the target's frozen language-model head (Liu et al., "Kangaroo: Lossless Self-Speculative
Decoding via Double Early Exiting", 2024). The attention sees the text so far in a cache of its own
(`insert_kv_cache`). With ``copied`` the adapter is a whole decoder layer of the target's own kind,
which starts as a copy of its last one: the early-exiting layer of EESD (Liu et al., "Speculative
Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism",
2024). The step must be cut at the exit (`cut_depth`), so that verification takes the
drafted tokens up where the draft has left them. The second exit, from drafting, is a length policy
(`length_confidence`). New weights know little: train them with `graftwork train`; the target stays
as it is. Refuses exits where there is no layer, programs without markers or a language-model head,
or with a function of that name, and copies of layers that take more than states and positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.fx

from ....ir import Program
from ...engine.base import Outcome
from ...policies import builds
from ..copied_layer import copied_layer, copied_norm
from ..decoder_layer import LayerShape, angles_at, decoder_layer
from ..draft_pass import DraftHeadPass
from ..grafts import Graft
from . import AdaptedExitDraft

NAME = "adapter"


@builds(AdaptedExitDraft, exit=2, levels=6, aim="distribution")
class DraftAdapter(DraftHeadPass):
    """copied: whether the adapter is a whole layer that starts as the target's last one. The rest:
    see `DraftHeadPass` and the record."""

    copied: bool = False

    name: ClassVar[str] = "draft_adapter"

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        draft: AdaptedExitDraft = self.made(function=NAME)
        output = graft.tap(draft.exit - 1)
        positions = graft.input("positions", dtype=torch.int64)
        hidden = graft.input("hidden", graft.hidden)
        continued = copied_layer if self.copied else _attended
        x = continued(graft, hidden, positions, NAME)
        logits = graft.head(copied_norm(graft, x, f"{NAME}.norm"))
        outputs = dict(graft.picked(x, graft.candidates(logits, self.candidates)))
        del outputs["hidden"]  # a drafted token's own state comes from the target's layers
        return Outcome(graft.drafted(outputs, replace(draft, output=output)), 1)


def _attended(
    graft: Graft, hidden: torch.fx.Node, positions: torch.fx.Node, name: str
) -> torch.fx.Node:
    """hidden [B,T,H] and what new attention in the target's proportions hears of the text."""
    shape = replace(LayerShape.of(graft.step, graft.owner, graft.hidden), inner=0)
    angles = angles_at(graft, positions, shape.dim)
    normed = graft.rms_norm(hidden, f"{name}.input_layernorm", shape.eps)
    return decoder_layer(graft, hidden, angles, name, shape, source=normed)
