"""Draft the first tokens with layers in series, the later ones with heads in parallel.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (serial=2, heads=5)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func gumiho(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ...
    func gumiho_heads(tokens: i64[B,T,2], hidden: f32[B,T,2,H]) -> draft_logits f32[B,T,5,V], ...
    decode {
      draft = continued(first=cached(function="gumiho", levels=2, ...),
                        then=joined_heads(function="gumiho_heads", levels=5, ...), ...)

Every token of a draft hangs on the ones before it, so the first ones get what is better and slower:
a linear layer on [embedding; feature] and decoder layers, run once a token, as in `draft_eagle`;
all but the first of these norm what they read. All later tokens are predicted at once, each by a
head. Heads take that linear layer's fc([e; h]) of every drafted token e and the state h that it was
chosen from, side by side, so each sibling of the last serial token gets continuations of its own:
x = SiLU(W_0 [fc_1; fc_2] + b_0) goes through `blocks` blocks x + SiLU(W x + b) and the target's
frozen language-model head (Li et al., "Gumiho: A Hybrid Architecture to Prioritize Early Tokens in
Speculative Decoding", 2025). New weights know nothing: train them with `graftwork train`. `weights`
may also be published ones (``fc.*``, ``layers.i.*``, ``mlp.i.j.linear.*``), as safetensors. Refuses
what `draft_eagle` refuses, and published tensors that do not fit, by name.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ....ir import Program
from ....ir.plan import CachedDraft, ContinuedDraft
from ....ir.plan.bounds import Levels
from ...engine.base import Outcome
from ...policies import builds
from ..decoder_layer import LayerShape, angles_at, decoder_layer
from ..draft_pass import DraftHeadPass
from ..grafts import Graft
from . import JoinedHeadsDraft

A = torch.ops.aten


@builds(ContinuedDraft, "token", "feature", "later", "noise", aim="distribution")
class DraftGumiho(DraftHeadPass):
    """serial: tokens predicted one after the other. layers: decoder layers for them. heads: tokens
    predicted at once after those. blocks: of a head, after its first. bias: whether the linear
    layer has one. The rest: see `DraftHeadPass` and the record."""

    serial: Levels = 2
    layers: int = Field(default=2, ge=1)
    heads: Levels = 5
    blocks: int = Field(default=5, ge=0, le=64)
    bias: bool = True

    name: ClassVar[str] = "draft_gumiho"
    unread: ClassVar[tuple[str, ...]] = ("embed_tokens.weight",)

    def insert(self, program: Program) -> Outcome:
        program, output = self._serial(program)
        program = self._parallel(program)
        first = CachedDraft("gumiho", output, self.serial)
        then = JoinedHeadsDraft("gumiho_heads", self.heads)
        later: float = self.made().decay / 9
        program = self.continued(
            program, first, then, token=0.1, feature=1.0, later=later, noise=True
        )
        return Outcome(program, 1 + self.heads)

    def _serial(self, program: Program) -> tuple[Program, str]:
        graft = self.graft(program, "gumiho")
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        x = graft.fused(tokens, hidden, "gumiho.fc", bias=self.bias)
        angles = angles_at(graft, positions, shape.dim)
        for layer in range(self.layers):
            name = f"gumiho.layers.{layer}"
            # EAGLE's layer has no norm before it; those behind it are as usual.
            source = graft.rms_norm(x, f"{name}.input_layernorm", shape.eps) if layer else None
            x = decoder_layer(graft, x, angles, name, shape, source=source)
        outputs = graft.picked(x, graft.candidates(graft.head(x), self.candidates))
        return graft.done(outputs), output

    def _parallel(self, program: Program) -> Program:
        graft = self.graft(program, "gumiho_heads")
        steps, size = self.serial, graft.hidden
        tokens = graft.input("tokens", steps, dtype=torch.int64)
        hidden = graft.input("hidden", steps, size)
        # Tokens of a step at a time: the target's embedding takes [B,T].
        pairs = [
            [graft.call(A.select.int, x, 2, n) for x in (tokens, hidden)] for n in range(steps)
        ]
        joined = graft.concat(*(graft.fused(e, h, "gumiho.fc", bias=self.bias) for e, h in pairs))
        made = [self._head(graft, joined, f"gumiho.mlp.{number}") for number in range(self.heads)]
        best = graft.candidates(graft.stacked([graft.head(x) for x in made]), self.candidates)
        return graft.done({**best, "feature": graft.stacked(made)})

    def _head(self, graft: Graft, joined: torch.fx.Node, name: str) -> torch.fx.Node:
        """What the target's head reads of a token, [B,T,H]."""
        x = graft.linear(joined, f"{name}.0.linear", graft.hidden)
        x = graft.call(A.silu.default, x)
        for block in range(1, 1 + self.blocks):
            x = graft.res_block(x, f"{name}.{block}.linear")
        return x
