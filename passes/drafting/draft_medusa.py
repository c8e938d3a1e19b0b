"""Draft with parallel heads on the last hidden state.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] {
      %h: f32[B,T,H] = graftwork.hidden(%x, layer=7, point="block")

After (heads=4)::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], hidden f32[B,T,H] { ... }
    func medusa(hidden: f32[B,T,H]) -> draft_logits f32[B,T,4,V], draft_tokens i64[B,T,4,10], ...
    decode {
      draft = heads(function="medusa", levels=4, ...)

Head k predicts the token k + 2 places after the one that made the hidden state: some blocks
x + SiLU(W x + b) with W = 0 at first, then a language-model head that starts as a copy of the
target's (Cai et al., "Medusa", 2024). With ``own_head=False`` all heads share the target's frozen
one, a fraction of the weights (blockwise decoding, Stern et al. 2018, adds k hidden layers so). New
heads know nothing: train them with `graftwork train`. Refuses programs without a marker, without a
language-model head, or with a function of that name.
"""

from __future__ import annotations

from typing import ClassVar

import torch.fx
from pydantic import Field

from ...ir import Program
from ...ir.plan import HeadsDraft
from ...ir.plan.bounds import Levels
from ..engine.base import Outcome
from ..policies import builds
from .draft_pass import DraftHeadPass
from .grafts import Graft


@builds(HeadsDraft, "levels")
class DraftMedusa(DraftHeadPass):
    """heads: tokens predicted. layers: blocks a head. own_head: a language-model head each. The
    rest: see `DraftHeadPass` and the record."""

    heads: Levels = 4
    layers: int = Field(default=1, ge=1)
    own_head: bool = True

    name: ClassVar[str] = "draft_medusa"

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, "medusa")
        hidden = graft.input(graft.tap(), graft.hidden)
        normed = graft.norm(hidden)
        logits = [self._head(graft, normed, number) for number in range(self.heads)]
        outputs = graft.candidates(graft.stacked(logits), self.candidates)
        draft = self.made(function="medusa", levels=self.heads)
        return Outcome(graft.drafted(outputs, draft), self.heads)

    def _head(self, graft: Graft, x: torch.fx.Node, number: int) -> torch.fx.Node:
        for layer in range(self.layers):
            x = graft.res_block(x, f"medusa.{number}.{layer}.linear")
        own = f"medusa.{number}.{self.layers}.weight" if self.own_head else ""
        return graft.head(x, own)
