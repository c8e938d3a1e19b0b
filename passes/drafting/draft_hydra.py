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
Dependent Draft Heads for Medusa Decoding", 2024). With ``prefix=True`` h is not the target's own
but what a decoder layer with a cache makes of all hidden states up to it (Hydra++)::

    func hydra_prefix(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H]) -> hidden ...
    decode {
      draft = recurrent(..., entry="hydra_prefix", ...)

New heads know nothing: train them with `graftwork train`. `weights` may also be published ones
(``hydra_mlp.*``, ``hydra_lm_head.*``, ``prefix_embeding_layer.*``), as safetensors; those have
biases everywhere. Refuses what `draft_medusa` refuses, a step without an embedding table, and
published tensors that do not fit, by name.
"""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from pydantic import Field

from ...ir import Program
from ...ir.plan import RecurrentDraft
from ...ir.plan.bounds import Levels
from ..engine.base import Outcome
from ..engine.plan_edits import with_draft
from ..policies import builds
from .decoder_layer import LayerShape, angles_at, decoder_layer
from .draft_pass import DraftHeadPass

A = torch.ops.aten


@builds(RecurrentDraft, "levels", decay=1.0)
class DraftHydra(DraftHeadPass):
    """heads: tokens predicted. layers: blocks a head after the first. own_head: a language-model
    head each. prefix: a decoder layer before the heads. bias: biases in the linear skip and the
    heads too. The rest: see `DraftHeadPass` and the record."""

    heads: Levels = 4
    layers: int = Field(default=1, ge=0)
    own_head: bool = True
    prefix: bool = False
    bias: bool = False

    name: ClassVar[str] = "draft_hydra"
    unread: ClassVar[tuple[str, ...]] = ("prefix_embeding_layer.embed_tokens.weight",)

    def insert(self, program: Program) -> Outcome:
        if self.prefix:
            program = self._prefix(program)
        for number in range(self.heads):
            program = self._head(program, number)
        functions = tuple(f"hydra_{number}" for number in range(self.heads))
        entry = "hydra_prefix" if self.prefix else None
        trained = bool(self.weights)
        draft = self.made(functions=functions, levels=self.heads, trained=trained, entry=entry)
        return Outcome(with_draft(program, draft), self.heads)

    def published(self, name: str) -> tuple[str, ...]:
        """Each block stands after a dropout, in a sequence that counts both."""
        if part := re.fullmatch(r"hydra\.(\d+)\.(skip|in|head|\d+\.linear)\.(weight|bias)", name):
            head, kind, leaf = part.groups()
            places = {"skip": "1.res_connection", "in": "1.linear"}
            if kind == "head":
                return (f"hydra_lm_head.{head}.1.{leaf}",)
            place = places.get(kind) or f"{3 + 2 * int(kind.partition('.')[0])}.linear"
            return (f"hydra_mlp.{head}.{place}.{leaf}",)
        layer = name.removeprefix("hydra.prefix.")
        if layer == "norm.weight":
            return ("prefix_embeding_layer.norm.weight",)
        return (f"prefix_embeding_layer.layers.0.{layer}",)

    def _prefix(self, program: Program) -> Program:
        graft = self.graft(program, "hydra_prefix")
        graft.tap()
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        # Every function with a cache takes tokens; this one does not look at them.
        _, positions, before = graft.text_inputs()
        hidden = graft.norm(before)
        layer = "hydra.prefix"
        normed = graft.rms_norm(hidden, f"{layer}.input_layernorm", shape.eps)
        angles = angles_at(graft, positions, shape.dim)
        x = decoder_layer(graft, hidden, angles, layer, shape, source=normed)
        return graft.done({"hidden": graft.rms_norm(x, f"{layer}.norm", shape.eps)})

    def _head(self, program: Program, number: int) -> Program:
        graft = self.graft(program, f"hydra_{number}")
        graft.tap()
        tokens = graft.input("tokens", dtype=torch.int64)
        before = graft.input("state", graft.hidden * (number + 1))
        # The states are normed once, where they enter.
        seen = before if number or self.prefix else graft.norm(before)
        state = graft.concat(seen, graft.embed(tokens))
        # At first every head is the target's own: the skip passes h on, and the rest adds nothing.
        skip = graft.linear(state, f"hydra.{number}.skip", graft.hidden, bias=self.bias, init="eye")
        inner = graft.linear(state, f"hydra.{number}.in", graft.hidden, init="zeros")
        x = graft.call(A.add.Tensor, skip, graft.call(A.silu.default, inner))
        for layer in range(self.layers):
            x = graft.res_block(x, f"hydra.{number}.{layer}.linear")
        logits = graft.head(x, own=f"hydra.{number}.head.weight" if self.own_head else "")
        if self.bias and self.own_head:
            bias = graft.parameter(f"hydra.{number}.head.bias", graft.words, init="zeros")
            logits = graft.call(A.add.Tensor, logits, bias)
        return graft.done({"state": state, **graft.candidates(logits, self.candidates)})
