"""Draft with a layer that asks the target's states of the text, by what three tokens mean.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (levels=2)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func chimera(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], before: i64[B,T,2])
        -> hidden f32[B,T,H], joined f32[B,T,2*H]
    func chimera_0(hidden: f32[B,T,2*H]) -> draft_logits f32[B,T,V], draft_tokens i64[B,T,10], ...
    func chimera_1(hidden: f32[B,T,2*H]) -> draft_logits ...
    decode {
      draft = chimera(function="chimera", output="hidden.normed", levels=2,
                      heads=("chimera_0", "chimera_1"), ...)

The trigram encoder at the bottom makes a state g of a token and the two before it, in two steps: a
block x + SiLU(W x + b) on their embeddings [e_1; e_2; e_3], and a linear layer 3H -> H. The full
encoder, a decoder layer in the target's proportions, attends with g to the states that the target
has of all tokens before, what its head reads, under one norm for both; its output stands in for
the state that the target will have of the token. Head k reads that and, beside it (the residual),
the target's last state: [h; x] W^T, whose left half starts as the target's head and whose right
half starts at zero (Zeng et al., "Chimera: A Lossless Decoding Method for Accelerating Large
Language Models Inference by Fusing all Tokens", 2024). A drafted token asks the states that stand
in for the target's, too. New weights know nothing: train them with `graftwork train`. Refuses what
`draft_eagle` refuses.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ....ir import Program
from ...engine.base import Outcome
from ...engine.plan_edits import with_draft
from ...policies import builds
from ..decoder_layer import LayerShape, angles_at, decoder_layer
from ..draft_pass import DraftHeadPass
from . import ChimeraDraft

A = torch.ops.aten
NAME = "chimera"


@builds(ChimeraDraft, "rollout", aim="distribution", decay=1.0)
class DraftChimera(DraftHeadPass):
    """The options: see `DraftHeadPass` and the record."""

    name: ClassVar[str] = "draft_chimera"

    def insert(self, program: Program) -> Outcome:
        program, output = self._encoders(program)
        draft: ChimeraDraft = self.made()
        heads = tuple(f"{NAME}_{level}" for level in range(draft.levels))
        for level in range(draft.levels):
            program = self._head(program, level)
        draft = self.made(function=NAME, output=output, heads=heads)
        return Outcome(with_draft(program, draft), draft.levels)

    def _encoders(self, program: Program) -> tuple[Program, str]:
        graft = self.graft(program, NAME)
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        before = graft.input("before", 2, dtype=torch.int64)
        # Tokens of a place at a time: the target's embedding takes [B,T].
        three = [*(graft.call(A.select.int, before, 2, place) for place in range(2)), tokens]
        grams = graft.concat(*map(graft.embed, three))
        grams = graft.res_block(grams, f"{NAME}.trigram.0.linear")
        x = graft.linear(grams, f"{NAME}.trigram.1", graft.hidden, bias=False)
        layer = f"{NAME}.layers.0"
        asks, told = (
            graft.rms_norm(rows, f"{layer}.input_layernorm", shape.eps) for rows in (x, hidden)
        )
        angles = angles_at(graft, positions, shape.dim)
        x = decoder_layer(graft, x, angles, layer, shape, source=asks, rows=told)
        return graft.done({"hidden": x, "joined": graft.concat(hidden, x)}), output

    def _head(self, program: Program, level: int) -> Program:
        graft = self.graft(program, f"{NAME}_{level}")
        told = graft.input("hidden", 2 * graft.hidden)
        logits = graft.head(told, own=f"{NAME}.heads.{level}.weight")
        return graft.done(graft.candidates(logits, self.candidates))
