"""Draft with heads in sequence that weigh each drafted token against a state, after own layers.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (heads=4)::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], hidden f32[B,T,H], hidden.normed ...
    func clover(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ..., feature ...
    func clover_later(tokens: i64[B,T], state: f32[B,T,H]) -> state f32[B,T,H], draft_logits ...
    decode {
      draft = continued(first=cached(function="clover", levels=1, ...),
                        then=recurrent(functions=("clover_later",), levels=3, ...), ...)

An attention block adds to a state h what a token e says: values of e, each head's weighed by the
cosine between its query, made of the normed h, and its key, made of e. At the first level, which
has the target's own states of the text, layers that start as copies of the target's last one
(augmenting layers) and a norm follow, with a cache; what the norm of the heads makes of P h goes to
the target's frozen head. All later levels share one block of their own and one projector: the state
that the block makes goes on to the next level, and that norm of W [h; e] to the target's head (Xiao
et al., "Clover-2: Accurate Inference for Regressive Lightweight Speculative Decoding", 2024; the
first Clover is `draft_clover1`). New weights know little: train them with `graftwork train`.
Refuses what `draft_eagle` refuses, and a step whose last layer cannot be copied.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Program
from ...ir.plan import CachedDraft, ContinuedDraft, RecurrentDraft
from ..engine.base import Outcome
from ..policies import builds
from .attention_decoder import attention_decoder
from .copied_layer import copied_layer, copied_norm
from .draft_pass import DraftHeadPass
from .grafts import Graft


@builds(ContinuedDraft, "token", "feature", "later", "noise", decay=0.7, aim="distribution")
class DraftClover(DraftHeadPass):
    """heads: tokens predicted. layers: augmenting ones. The rest: `DraftHeadPass`, the record."""

    heads: int = Field(default=5, ge=2)
    layers: int = Field(default=2, ge=1)

    name: ClassVar[str] = "draft_clover"

    def insert(self, program: Program) -> Outcome:
        program, first = self._first(program)
        program = self._later(program)
        then = RecurrentDraft(("clover_later",), self.heads - 1)
        later: float = self.made().decay
        program = self.continued(
            program, first, then, feature=10.0, near="hidden.normed", later=later
        )
        return Outcome(program, self.heads)

    def _first(self, program: Program) -> tuple[Program, CachedDraft]:
        graft = self.graft(program, "clover")
        output = graft.tap()
        graft.tap_normed()  # what the heads are to read, in training
        tokens, positions, hidden = graft.text_inputs()
        x = attention_decoder(graft, hidden, graft.embed(tokens), "clover.first")
        for layer in range(self.layers):
            x = copied_layer(graft, x, positions, f"clover.layers.{layer}")
        state = copied_norm(graft, x, "clover.norm")
        projected = graft.linear(state, "clover.first.projector", graft.hidden, init="eye")
        outputs = graft.picked(state, self._said(graft, projected))
        return graft.done(outputs), CachedDraft("clover", output, 1)

    def _later(self, program: Program) -> Program:
        graft = self.graft(program, "clover_later")
        e = graft.embed(graft.input("tokens", dtype=torch.int64))
        state = attention_decoder(graft, graft.input("state", graft.hidden), e, "clover.later")
        both = graft.concat(state, e)
        projected = graft.linear(both, "clover.later.projector", graft.hidden, init="eye")
        return graft.done({"state": state, **self._said(graft, projected)})

    def _said(self, graft: Graft, x: torch.fx.Node) -> dict[str, torch.fx.Node]:
        """What the target's head says of a projected state behind the norm that all heads share."""
        feature = copied_norm(graft, x, "clover.head_norm")
        return {**graft.candidates(graft.head(feature), self.candidates), "feature": feature}
