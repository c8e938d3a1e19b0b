"""Draft with the layer that the checkpoint has for it: multi-token prediction.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], hidden.normed f32[B,T,H]
    func mtp(tokens: i64[B,T], positions: i64[B,T], hidden: f32[B,T,H], select: i64[B,S])
        -> hidden f32[B,T,H], draft_logits f32[B,S,V], draft_tokens i64[B,S,10], ...
    decode {
      draft = cached(function="mtp", output="hidden.normed", levels=3, ...)

The embedding of token t + 1 and what the target's head reads at token t are normed, joined and go
through a block of the target's own kind, which was trained with the target; the target's embedding
and head are shared (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024; GLM-4.5, Qwen3-Next and
others ship such layers). Below the first level the layer reads its own states. The layer is traced
from the checkpoint by whoever starts the passes (`Program.guests`), because transformers leaves it
out; its weights are called ``mtp.*``. `weights` are those of a layer that was trained further.
Refuses a program without the layer beside it, what `draft_eagle` refuses, and a layer that returns
states of another size than the target's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, cone, type_of
from ...ir.plan import CachedDraft
from ...ir.rewrite.subgraph import tables_of
from ..engine.base import Outcome
from ..policies import builds
from .decoder_layer import next_layer
from .draft_pass import DraftPass
from .grafts import Graft

A, G = torch.ops.aten, torch.ops.graftwork
NAME = "mtp"
_LAYERED = (G.attention.default, G.linear_attention.default, G.causal_conv.default)


@builds(CachedDraft, "decay", levels=3, rollout=3)
class DraftMtp(DraftPass):
    """layer: which one of the checkpoint's, counted from 0. weights: a file of such weights, or the
    folder that training wrote; empty: the checkpoint's. The rest: see `DraftPass` and the record.
    """

    layer: int = Field(default=0, ge=0)

    name: ClassVar[str] = "draft_mtp"
    knows: ClassVar[bool] = True
    brings: ClassVar[str] = "a checkpoint with an MTP layer"

    @property
    def parts(self) -> tuple[str, ...]:
        return (f"{NAME}.{self.layer}",)

    def insert(self, program: Program) -> Outcome:
        (part,) = self.parts
        guest = program.guests.get(part)
        if guest is None:
            raise PassError(
                f"{self.name}: expected the checkpoint's layer {part} beside the program; start "
                f"from graftwork.optimize and a checkpoint folder"
            )
        graft = self.graft(program, NAME)
        output = graft.tap_normed()
        tokens, positions, hidden = graft.text_inputs()
        given = {
            _embedding(guest.step): graft.embed(tokens),
            guest.step.input("positions"): positions,
            guest.step.input("hidden"): hidden,
        }
        state = _grafted(graft, guest, given)
        best = graft.candidates(graft.head(state), self.candidates)
        outputs = graft.picked(state, best)
        made = graft.drafted(outputs, self.made(function=NAME, output=output))
        rest = {name: other for name, other in program.guests.items() if name != part}
        return Outcome(made.replace(guests=rest), 1)


def _embedding(step: Function) -> torch.fx.Node:
    """Where the layer looks tokens up: the target's own table stands for that."""
    tokens = step.input("tokens")
    (found,) = (user for user in tokens.users if user.target is A.embedding.default)
    return found


def _grafted(
    graft: Graft, guest: Program, given: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """The layer's state [B,T,H] in the graft's function; its weights are the graft's. Errors:
    `PassError` for states that are not like the target's."""
    made = guest.step.outputs["hidden"]
    wanted, found = type_of(graft.markers[-1]), type_of(made)
    if found != wanted:
        raise PassError(
            f"{graft.owner}: the layer's states are {found}, and the target's {wanted}: they are "
            f"not of one model"
        )
    tables = tables_of(guest.step)
    values: dict[Any, torch.fx.Node] = dict(given)
    for node in sorted(cone([made], values)):  # fx nodes compare by their place in the graph
        if node.op == "get_attr":
            weight = guest.weights[str(node.target)].renamed(f"{NAME}.{node.target}")
            fixed = node.target in tables or not weight.type.dtype.is_floating_point
            values[node] = graft.constant(weight) if fixed else graft.weight_of(weight)
    first, had = next_layer(graft), set(graft.fn)
    state = graft.copy(values, made)
    for node in set(graft.fn) - had:
        if node.target in _LAYERED:
            node.update_kwarg("layer", first + int(node.kwargs["layer"]))  # type: ignore[arg-type]
    return graft.unmarked(state)
