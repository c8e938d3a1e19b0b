"""Draft with the target's own first layers and a head on their state.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] {
      %h: f32[B,T,H] = graftwork.hidden(%x, layer=2, point="block")

After (exit=3)::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], hidden.2 f32[B,T,H] { ... }
    draft func exit_head(hidden: f32[B,T,H]) -> draft_logits f32[B,T,V], draft_tokens, ...
    decode {
      draft = exit(function="exit_head", output="hidden.2", exit=3, levels=4)

A drafted token runs through the first layers, and the head says what follows it. The step must be
cut there (`cut_depth`), so that verification takes the drafted tokens up where the draft has left
them: their first layers' cache rows and states are used again, and only the other layers run
(Elhoushi et al., "LayerSkip", 2024). With ``own_head=False`` the head is the target's own norm and
language-model head, as in the paper, for targets that were trained to leave early. Otherwise the
target stays as it is, and the head is trained (`graftwork train`): a norm, `layers` blocks
x + SiLU(W x + b) with W = 0 at first, and a language-model head that starts as a copy of the
target's. Refuses exits where there is no layer, and programs without markers or a language-model
head, or with a function of that name.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from ....ir import Program
from ...engine.base import Outcome
from ...policies import builds
from ..draft_pass import DraftHeadPass
from . import ExitDraft

NAME = "exit_head"


@builds(ExitDraft)
class DraftExit(DraftHeadPass):
    """own_head: a trained head instead of the target's own. layers: blocks of that head. The rest:
    see `DraftHeadPass` and the record."""

    vocabulary: int = Field(default=0, ge=0)  # the target's head needs no training
    own_head: bool = True
    layers: int = Field(default=1, ge=0, le=16)

    @property
    def knows(self) -> bool:
        return super().knows or not self.own_head

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        draft: ExitDraft = self.made(function=NAME)
        output = graft.tap(draft.exit - 1)
        x = graft.input("hidden", graft.hidden)
        if self.own_head:
            x = graft.rms_norm(x, f"{NAME}.norm")
            for layer in range(self.layers):
                x = graft.res_block(x, f"{NAME}.{layer}.linear")
            logits = graft.head(x, f"{NAME}.{self.layers}.weight")
        else:
            logits = graft.head(graft.norm(x))
        outputs = graft.candidates(logits, self.candidates)
        return Outcome(graft.drafted(outputs, replace(draft, output=output)), 1)
