"""Draft with a model of its own that starts as some of the target's layers.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (count=2)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func short(tokens: i64[B,T], positions: i64[B,T], select: i64[B,S])
        -> draft_logits f32[B,S,V], draft_tokens i64[B,S,10], draft_scores f32[B,S,10] {
      %e: f32[B,T,H] = aten.embedding(@embed, %tokens)
      ... layers 0 and 1 with weights of their own ...
      ... norm and head with weights of their own, for the tokens that are asked for ...
    decode {
      draft = cached(function="layers", output=None, levels=5, ...)

The usual draft where a family has no small model: the first layers of a large one, fine-tuned by
themselves (Kavehzadeh et al., "S2D", 2024: 12 of 32), or distilled from it (Zhou et al.,
"DistillSpec", 2024; ``aim``). It reads nothing of the target but its embedding, which stays as it
is, and has a cache of its own: unlike the layers of `draft_exit` these may become what they like,
and the target stays as it is. ``layers`` names others than the first. Untrained layers know little:
train them with `graftwork train`. Refuses layers that there are not, and what draft heads refuse of
programs.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import PassError, Program
from ...ir.plan import CachedDraft
from ..engine.base import Outcome
from ..engine.plan_edits import with_draft
from ..policies import builds
from .copied_layer import copied_layer, copied_norm, layers_of
from .draft_pass import DraftHeadPass
from .grafts import Graft

G = torch.ops.graftwork
NAME = "short"

Chosen = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=512)]


@builds(CachedDraft, "rollout", "decay", aim="distribution")
class DraftLayers(DraftHeadPass):
    """count: how many of the target's first layers it starts as; 0: three eighths of them. layers:
    or which, counted from 0. The rest: see `DraftHeadPass` and the record."""

    count: int = Field(default=0, ge=0, le=512)
    layers: Chosen = ()

    name: ClassVar[str] = "draft_layers"

    def insert(self, program: Program) -> Outcome:
        graft = self.graft(program, NAME)
        tokens = graft.input("tokens", dtype=torch.int64)
        positions = graft.input("positions", dtype=torch.int64)
        pairs = layers_of(graft)
        if not pairs:
            raise PassError(
                f"{self.name}: step has no graftwork.hidden markers before and after its layers"
            )
        given = {graft.step.input("tokens"): tokens, graft.step.input("positions"): positions}
        x = graft.copy(given, pairs[0][0])
        states = []
        for index, which in enumerate(self._which(len(pairs))):
            x = copied_layer(graft, x, positions, f"{NAME}.{index}", which)
            states.append(x)
        x = _marked(graft, states)
        logits = graft.head(copied_norm(graft, x, f"{NAME}.norm"), f"{NAME}.head.weight")
        outputs = graft.picked(x, graft.candidates(logits, self.candidates))
        del outputs["hidden"]
        draft = self.made(function=NAME, output=None)
        return Outcome(with_draft(graft.done(outputs), draft), len(states))

    def _which(self, have: int) -> tuple[int, ...]:
        """The layers, of `have`. Errors: `PassError` for such as there are not."""
        if self.layers and self.count:
            raise PassError(f"{self.name}: set count or layers, not both")
        chosen = self.layers or tuple(range(self.count or max(1, round(have * 3 / 8))))
        if max(chosen) >= have:
            raise PassError(
                f"{self.name}: {'layers' if self.layers else 'count'} asks for layer "
                f"{max(chosen)}, and the target has {have}, counted from 0"
            )
        return chosen


def _marked(graft: Graft, states: list[torch.fx.Node]) -> torch.fx.Node:
    """The last of the states behind layers [B,T,H], all of them marked as such."""
    for index, state in enumerate(states):
        users = list(state.users)
        with graft.fn.graph.inserting_after(state):
            marker = graft.call(G.hidden.default, state, layer=index, point="block")
        for user in users:
            user.replace_input_with(state, marker)
    return marker
