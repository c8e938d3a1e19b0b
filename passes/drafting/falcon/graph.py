"""Draft with a layer of its own that predicts a block of features in a call (Falcon).

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func falcon(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ...
    decode {
      draft = semi_autoregressive(function="falcon", output="hidden.normed", levels=6, block=2, ...)

Token t + 1 together with the feature of token t (what the target's head reads) goes through cells
of an LSTM and one decoder layer without input norm, which gives the feature `block` places on; the
target's frozen head turns it into logits. Attention is causal by blocks: the places of a block see
each other, so the k states at a text's end tell of its next k tokens at once, and those states and
tokens, fed in their turn, of k more (Gao et al., "Falcon: Faster and Parallel Inference of Large
Language Models through Enhanced Semi-Autoregressive Drafting and Custom-Designed Decoding Tree",
2024). A cell begins at zero at each token::

    %g: f32[B,T,4H] = aten.linear(%x, @falcon.lstm.weight_ih_l0, @falcon.lstm.bias_l0)
    %x: f32[B,T,H] = sigmoid(o) * tanh(sigmoid(i) * tanh(c))    # of the quarters i, f, c, o of %g

New layers know nothing: train them with `graftwork train`. Refuses what `draft_eagle` refuses, a
block of one token, and fewer levels than a block has.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ....ir import Program
from ...engine.base import Outcome
from ...policies import builds
from ..decoder_layer import LayerShape, angles_at, decoder_layer
from ..draft_pass import DraftHeadPass
from ..grafts import Graft
from . import SemiAutoregressiveDraft

A = torch.ops.aten
NAME = "falcon"


@builds(SemiAutoregressiveDraft, "rollout", "decay", levels=6, aim="distribution")
class DraftFalcon(DraftHeadPass):
    """cells: LSTM cells before the layer. The rest: see `DraftHeadPass` and the record."""

    cells: int = Field(default=2, ge=1)

    name: ClassVar[str] = "draft_falcon"

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        shape = LayerShape.of(graft.step, self.name, graft.hidden)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        x = graft.concat(graft.embed(tokens), hidden)
        for index in range(self.cells):
            x = self._cell(graft, x, index)
        angles = angles_at(graft, positions, shape.dim)
        x = decoder_layer(graft, x, angles, f"{NAME}.layers.0", shape)
        outputs = graft.picked(x, graft.candidates(graft.head(x), self.candidates))
        draft = self.made(function=NAME, output=output)
        return Outcome(graft.drafted(outputs, draft), 1)

    def _cell(self, graft: Graft, x: torch.fx.Node, index: int) -> torch.fx.Node:
        """The first step [B,T,H] of an LSTM's layer, whose forget gate has nothing to forget."""
        size = graft.hidden
        inputs = (2 if index == 0 else 1) * size
        weight = graft.parameter(f"{NAME}.lstm.weight_ih_l{index}", 4 * size, inputs)
        bias = graft.parameter(f"{NAME}.lstm.bias_l{index}", 4 * size, init="zeros")
        gates = graft.call(A.linear.default, x, weight, bias)
        parts = graft.call(A.split_with_sizes.default, gates, [size] * 4, -1)
        enters, _, content, leaves = (graft.fn.item(parts, place) for place in range(4))
        opened = graft.call(A.sigmoid.default, enters)
        cell = graft.call(A.mul.Tensor, opened, graft.call(A.tanh.default, content))
        shown = graft.call(A.sigmoid.default, leaves)
        return graft.call(A.mul.Tensor, shown, graft.call(A.tanh.default, cell))
