"""Compute logits only for the tokens that the decode loop asks for.

Before::

    %h: f32[B,T,H] = graftwork.hidden(%x, layer=7, point="block")
    ... final norm and head on %h ... -> logits f32[B,T,V]

After::

    func step(tokens, ..., select: i64[B,S]) -> logits f32[B,S,V] {
      %h: f32[B,T,H] = graftwork.hidden(%x, layer=7, point="block")
      %p: f32[B,S,H] = graftwork.pick_rows(%h, %select)
      ... final norm and head on %p ...

A prefill then runs the head on one token instead of the whole prompt. Outputs that the logits do
not depend on stay as they are. Other heads that have a part in the logits, behind markers at the
point "head", run on the same tokens. Applies to every function of the target that returns logits;
one that reads along (`Accompanied`) calls them as it is called itself.
Refuses a program without markers, and one where something between the last marker and the logits
also needs the other tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ...ir import Function, Program, VerifyError, cone, site_of
from ...ir.ops.marker import HEAD
from ...ir.ops.rounded_state import STEPS
from ...ir.plan.inputs import INPUTS
from ...ir.types import Sym
from ..engine.base import Effect, Outcome, Pass, register
from ..engine.functions import TARGET, edit_each

G = torch.ops.graftwork
MIXING = frozenset(
    {
        *(G.attention.default, G.attend.default, G.cache_write.default),
        *(G.linear_attention.default, G.causal_conv.default, *STEPS),
    }
)


@register
class PickLogits(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    provides: ClassVar[frozenset[str]] = frozenset({"picked"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.LOGITS})
    reads: ClassVar[frozenset[Effect]] = frozenset({Effect.FUNCTIONS})

    def run(self, program: Program) -> Outcome:
        return edit_each(program, _pick, TARGET)


def _pick(fn: Function) -> int | str:
    markers = fn.calls(G.hidden.default)
    said = next((name for name in ("logits", fn.name) if name in fn.outputs), None)
    if said is None:
        return f"{fn.name} returns no logits"
    lasts = [node for node in markers if node.kwargs["point"] != HEAD][-1:]
    if not lasts:
        return f"{fn.name} has no graftwork.hidden marker"
    if fn.has_input("select"):
        return f"{fn.name} has an input 'select' already"
    heads = [node for node in markers if node.kwargs["point"] == HEAD]
    return pick_after(fn, lasts[0], said, heads) or 1


def pick_after(
    fn: Function, last: torch.fx.Node, output: str, others: Collection[torch.fx.Node] = ()
) -> str:
    """Compute what lies between values [B,T,H] and an output for chosen tokens only (in place).

    Adds the input ``select``. Other outputs stay as they are. Returns why it cannot be done, or "".
    """
    needed = cone([fn.outputs[output]])
    select = fn.add_input("select", INPUTS["select"].type)
    picks = set()
    for value in (last, *others):
        # Where a head reads the last layer's own state, its marker comes behind the layer's.
        users = [user for user in value.users if user in needed and user not in others]
        with fn.graph.inserting_after(value):
            picked = fn.call(G.pick_rows.default, value, select, site=site_of(value))
        for user in users:
            user.replace_input_with(value, picked)
        picks.add(picked)
    tail = _descendants(fn, picks)
    if any(node.target in MIXING for node in tail):
        return "an op after the last marker mixes tokens"
    for node in tail:
        node.args = map_aggregate(node.args, _chosen)
        node.kwargs = map_aggregate(node.kwargs, _chosen)
    try:
        fn.retype()
    except VerifyError as error:
        return f"the head does not run on chosen tokens: {error}"
    return ""


def _descendants(fn: Function, roots: Collection[torch.fx.Node]) -> list[torch.fx.Node]:
    reached = set(roots)
    for node in fn.calls():
        if any(arg in reached for arg in node.all_input_nodes):
            reached.add(node)
    return [node for node in fn.calls() if node in reached and node not in roots]


def _chosen(arg: Any) -> Any:
    """A size that spoke of a step's T tokens, of the S chosen ones."""
    if not isinstance(arg, Sym) or "T" not in arg.symbols:
        return arg
    return arg.evaluate(lambda name: Sym("S") if name == "T" else Sym(name))
