"""Draft the first tokens with layers in series, the later ones with heads in parallel.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (serial=2, heads=3)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func gumiho(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ...
    func gumiho_heads(tokens: i64[B,T,2], hidden: f32[B,T,2,H]) -> draft_logits f32[B,T,3,V], ...
    decode {
      draft = continued(first=cached(function="gumiho", levels=2, ...),
                        then=joined_heads(function="gumiho_heads", levels=3, ...), ...)

Every token of a draft hangs on the ones before it, so the first ones get what is better and slower:
a linear layer on [embedding; feature] and decoder layers, run once a token, as in `draft_eagle`.
All later tokens are predicted at once, each by a head. Heads take that linear layer's
fc([e; h]) of every drafted token e and the state h that it was chosen from, side by side, so each
sibling of the last serial token gets continuations of its own: x = h + D SiLU(U [fc_1; fc_2]), h
the last of the states, under the target's frozen language-model head (Li et al., "Gumiho: A Hybrid
Architecture to Prioritize Early Tokens in Speculative Decoding", 2025). New weights know nothing:
train them with `graftwork train`. Refuses what `draft_eagle` refuses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Program
from ...ir.plan import CachedDraft, JoinedHeadsDraft
from ...ir.plan.bounds import Levels
from ..engine.base import Outcome, register
from .decoder_layer import LayerShape, angles_at, decoder_layer, next_layer
from .draft_pass import DraftPass
from .grafts import Graft

A = torch.ops.aten


@register
class DraftGumiho(DraftPass):
    """serial: tokens predicted one after the other. layers: decoder layers for them. heads: tokens
    predicted at once after those. inner: width of a head; None: twice the model's. The rest: see
    `DraftPass`."""

    serial: Levels = 2
    layers: int = Field(default=2, ge=1)
    heads: Levels = 3
    inner: int | None = Field(default=None, ge=1)

    name: ClassVar[str] = "draft_gumiho"

    def insert(self, program: Program) -> Outcome:
        """Graft layers and heads on. See the module docstring."""
        program, output = self._serial(program)
        program = self._parallel(program)
        first = CachedDraft("gumiho", output, self.serial)
        then = JoinedHeadsDraft("gumiho_heads", self.heads, self.decay)
        return Outcome(self.continued(program, first, then), 1 + self.heads)

    def _serial(self, program: Program) -> tuple[Program, str]:
        graft = Graft(program, self.name, "gumiho", self.weights)
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        x = self._fused(graft, tokens, hidden)
        angles = angles_at(graft, positions, shape.dim)
        for layer in range(self.layers):
            number = next_layer(graft)
            x = decoder_layer(graft, x, angles, f"gumiho.layers.{layer}", number, shape)
        outputs = graft.picked(x, graft.candidates(graft.head(x), self.candidates))
        return graft.done(outputs), output

    def _parallel(self, program: Program) -> Program:
        graft = Graft(program, self.name, "gumiho_heads", self.weights)
        steps, size = self.serial, graft.hidden
        tokens = graft.input("tokens", steps, dtype=torch.int64)
        hidden = graft.input("hidden", steps, size)
        # Tokens of a step at a time: the target's embedding takes [B,T].
        parts = [
            self._fused(graft, *(graft.call(A.select.int, x, 2, step) for x in (tokens, hidden)))
            for step in range(steps)
        ]
        joined = graft.concat(parts)
        last = graft.call(A.select.int, hidden, 2, steps - 1)
        logits = [
            self._head(graft, last, joined, f"gumiho.heads.{number}")
            for number in range(self.heads)
        ]
        every = graft.call(A.cat.default, logits, 2)
        return graft.done(graft.candidates(every, self.candidates))

    def _fused(self, graft: Graft, tokens: torch.fx.Node, hidden: torch.fx.Node) -> torch.fx.Node:
        """fc([e; h]), with the same weights wherever it stands."""
        joined = graft.concat([graft.embed(tokens), hidden])
        return graft.linear(joined, "gumiho.fc", graft.hidden)

    def _head(
        self, graft: Graft, last: torch.fx.Node, joined: torch.fx.Node, name: str
    ) -> torch.fx.Node:
        """Logits [B,T,1,V]; at first those of the last state itself."""
        inner = graft.linear(joined, f"{name}.up", self.inner or 2 * graft.hidden)
        inner = graft.call(A.silu.default, inner)
        more = graft.linear(inner, f"{name}.down", graft.hidden, init="zeros")
        logits = graft.head(graft.call(A.add.Tensor, last, more))
        return graft.call(A.unsqueeze.default, logits, 2)
