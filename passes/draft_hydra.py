"""Draft with heads in sequence: each also sees the tokens drafted before it.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V]

After (heads=4)::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], hidden f32[B,T,H]
    func hydra_0(tokens: i64[B,T], state: f32[B,T,H]) -> state f32[B,T,2H], draft_logits ...
    func hydra_1(tokens: i64[B,T], state: f32[B,T,2H]) -> state f32[B,T,3H], draft_logits ...
    ...
    decode {
      draft = recurrent(functions=("hydra_0", "hydra_1", ...), ...)

Head i sees [h; e_1; ...; e_{i+1}], the normed hidden state and the embeddings of the last committed
token and of the tokens drafted so far; a block with a linear skip brings that to H, further blocks
x + SiLU(W x + b) and a head that starts as the target's follow (Ankner et al., "Hydra: Sequentially
Dependent Draft Heads for Medusa Decoding", 2024). New heads know nothing: train them with
`graftwork train`. Refuses what `draft_medusa` refuses, and a step without an embedding table.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from ..ir import Program
from ..ir.plan import RecurrentDraft
from .base import Outcome, register
from .draft_pass import DraftPass
from .grafts import Graft
from .plan_edits import with_draft

A = torch.ops.aten


@register
class DraftHydra(DraftPass):
    """heads: tokens predicted. layers: blocks a head after the first. own_head: a language-model
    head each. The rest: see `DraftPass`."""

    heads: int = Field(default=4, ge=1)
    layers: int = Field(default=1, ge=0)
    own_head: bool = True

    name: ClassVar[str] = "draft_hydra"

    def run(self, program: Program) -> Outcome:
        """Graft the heads on. See the module docstring."""
        for number in range(self.heads):
            program = self._head(program, number)
        functions = tuple(f"hydra_{number}" for number in range(self.heads))
        draft = RecurrentDraft(functions, self.heads, self.decay, bool(self.weights))
        return Outcome(with_draft(program, draft), self.heads)

    def _head(self, program: Program, number: int) -> Program:
        graft = Graft(program, self.name, f"hydra_{number}", self.weights)
        graft.tap()
        tokens = graft.input("tokens", dtype=torch.int64)
        before = graft.input("state", graft.hidden * (number + 1))
        # The states are normed once, where they enter.
        seen = graft.norm(before) if number == 0 else before
        state = graft.concat([seen, graft.embed(tokens)])
        # At first every head is the target's own: the skip passes h on, and the rest adds nothing.
        skip = graft.linear(state, f"hydra.{number}.skip", graft.hidden, bias=False, init="eye")
        inner = graft.linear(state, f"hydra.{number}.in", graft.hidden, init="zeros")
        x = graft.call(A.add.Tensor, skip, graft.call(A.silu.default, inner))
        for layer in range(self.layers):
            x = graft.res_block(x, f"hydra.{number}.{layer}.linear")
        logits = graft.head(x, own=f"hydra.{number}.head.weight" if self.own_head else "")
        return graft.done({"state": state, **graft.candidates(logits, self.candidates)})
