"""Draft with heads in sequence behind a layer of their own, each of which hears one more token.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (heads=3)::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], hidden f32[B,T,H]
    func clover1_entry(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H])
        -> hidden f32[B,T,H]
    func clover1_0(tokens: i64[B,T], state: f32[B,T,H]) -> state f32[B,T,H], draft_logits ...
    func clover1_1(tokens: i64[B,T], state: f32[B,T,H]) -> state f32[B,T,H], draft_logits ...
    ...
    decode {
      draft = recurrent(functions=("clover1_0", ...), levels=3, entry="clover1_entry", ...)

Once a step, augmenting layers, which start as copies of the target's last one and have a cache,
turn the target's states into ones that are about what is to be drafted. Then level by level the
state hears the token before by an attention decoder that all heads share (the regressive
connection), and goes on so to the next level; blocks x + SiLU(W x + b) of each head's own, a norm
that all share and the target's frozen head say what follows (Xiao et al., "Clover: Regressive
Lightweight Speculative Decoding with Sequential Knowledge", 2024; `draft_clover` is Clover-2, whose
first head hears its token before the layers). New weights know little: train them with
`graftwork train`. Refuses what `draft_eagle` refuses, and a step whose last layer cannot be copied.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ...ir import Program
from ...ir.plan import RecurrentDraft
from ...ir.plan.bounds import Levels
from ..engine.base import Outcome
from ..engine.plan_edits import with_draft
from ..policies import builds
from .attention_decoder import attention_decoder
from .copied_layer import copied_layer, copied_norm
from .draft_pass import DraftHeadPass

ENTRY = "clover1_entry"


@builds(RecurrentDraft, "levels", decay=1.0)
class DraftClover1(DraftHeadPass):
    """heads: tokens predicted. layers: augmenting ones. blocks: of each head's MLP. The rest:
    `DraftHeadPass`, the record."""

    heads: Levels = 3
    layers: int = Field(default=1, ge=1)
    blocks: int = Field(default=1, ge=1)

    name: ClassVar[str] = "draft_clover1"

    def insert(self, program: Program) -> Outcome:
        program = self._entry(program)
        for number in range(self.heads):
            program = self._head(program, number)
        functions = tuple(f"clover1_{number}" for number in range(self.heads))
        draft = self.made(functions=functions, levels=self.heads, entry=ENTRY)
        return Outcome(with_draft(program, draft), self.heads)

    def _entry(self, program: Program) -> Program:
        graft = self.graft(program, ENTRY)
        graft.tap()
        # Every function with a cache takes tokens; this one does not look at them.
        _, positions, x = graft.text_inputs()
        for layer in range(self.layers):
            x = copied_layer(graft, x, positions, f"clover1.layers.{layer}")
        return graft.done({"hidden": x})

    def _head(self, program: Program, number: int) -> Program:
        graft = self.graft(program, f"clover1_{number}")
        e = graft.embed(graft.input("tokens", dtype=torch.int64))
        before = graft.input("state", graft.hidden)
        state = x = attention_decoder(graft, before, e, "clover1.decoder")
        for block in range(self.blocks):
            x = graft.res_block(x, f"clover1.{number}.{block}.linear")
        logits = graft.head(copied_norm(graft, x, "clover1.norm"))
        return graft.done({"state": state, **graft.candidates(logits, self.candidates)})
