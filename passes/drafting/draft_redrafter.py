"""Draft with a recurrent network that starts from the last hidden state.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V]

After::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], hidden f32[B,T,H]
    func redrafter_0(tokens: i64[B,T], state: f32[B,T,H]) -> state f32[B,T,2H], draft_logits ...
    func redrafter(tokens: i64[B,T], state: f32[B,T,2H]) -> state f32[B,T,2H], draft_logits ...
    decode {
      draft = recurrent(functions=("redrafter_0", "redrafter"), levels=5, ...)

s <- SiLU(W e + U s + b) from s = 0, e the embedding of the token before; [h; s], with h the normed
hidden state of the last committed token, goes through blocks x + SiLU(W x + b) of width 2H and a
head 2H -> V that starts as the target's on h. All levels share their weights, so any number of
levels can be drafted (Cheng et al., "Recurrent Drafter for Fast Speculative Decoding", 2024). With
``own_head=False``, which is not the paper's, a linear layer 2H -> H leads to the target's frozen
head. New weights know nothing: train them with `graftwork train`. Refuses what `draft_hydra`
refuses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ...ir import Program
from ...ir.plan import RecurrentDraft
from ..engine.base import Outcome
from ..engine.plan_edits import with_draft
from ..policies import builds
from .draft_pass import DraftHeadPass

A = torch.ops.aten


@builds(RecurrentDraft, levels=5, decay=1.0)
class DraftRedrafter(DraftHeadPass):
    """layers: blocks after the recurrence. own_head: a language-model head of its own. The rest:
    see `DraftHeadPass` and the record."""

    layers: int = Field(default=2, ge=0)
    own_head: bool = True

    name: ClassVar[str] = "draft_redrafter"

    def insert(self, program: Program) -> Outcome:
        functions = ("redrafter_0", "redrafter")
        for first, name in zip((True, False), functions, strict=True):
            program = self._function(program, name, first)
        draft = self.made(functions=functions)
        return Outcome(with_draft(program, draft), 1)

    def _function(self, program: Program, name: str, first: bool) -> Program:
        graft = self.graft(program, name)
        graft.tap()
        size = graft.hidden
        tokens = graft.input("tokens", dtype=torch.int64)
        state = graft.input("state", size if first else 2 * size)
        total = graft.linear(graft.embed(tokens), "redrafter.in", size)
        if first:
            hidden = graft.norm(state)
        else:
            parts = graft.call(A.split_with_sizes.default, state, [size, size], -1)
            hidden, before = graft.fn.item(parts, 0), graft.fn.item(parts, 1)
            carried = graft.linear(before, "redrafter.state", size, bias=False)
            total = graft.call(A.add.Tensor, total, carried)
        after = graft.concat(hidden, graft.call(A.silu.default, total))
        x = after
        for layer in range(self.layers):
            x = graft.res_block(x, f"redrafter.{layer}.linear")
        # At first h passes through and the drafter is the target's own head.
        if not self.own_head:
            x = graft.linear(x, "redrafter.out", size, bias=False, init="eye")
        logits = graft.head(x, own="redrafter.head.weight" if self.own_head else "")
        return graft.done({"state": after, **graft.candidates(logits, self.candidates)})
