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
not depend on stay as they are. Applies to every function of the target that returns logits. Refuses
a program without markers, and one where something between the last marker and the logits also needs
the other tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ...ir import Function, Program, VerifyError, cone, site_of
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
    if "logits" not in fn.outputs:
        return f"{fn.name} returns no logits"
    if not markers:
        return f"{fn.name} has no graftwork.hidden marker"
    if fn.has_input("select"):
        return f"{fn.name} has an input 'select' already"
    return pick_after(fn, markers[-1], "logits") or 1


def pick_after(fn: Function, last: torch.fx.Node, output: str) -> str:
    """Compute what lies between a value [B,T,H] and an output for chosen tokens only (in place).

    Adds the input ``select``. Other outputs stay as they are. Returns why it cannot be done, or "".
    """
    needed = cone([fn.outputs[output]])
    select = fn.add_input("select", INPUTS["select"].type)
    users = [user for user in last.users if user in needed]
    with fn.graph.inserting_after(last):
        picked = fn.call(G.pick_rows.default, last, select, site=site_of(last))
    for user in users:
        user.replace_input_with(last, picked)
    tail = _descendants(fn, picked)
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


def _descendants(fn: Function, root: torch.fx.Node) -> list[torch.fx.Node]:
    reached = {root}
    for node in fn.calls():
        if any(arg in reached for arg in node.all_input_nodes):
            reached.add(node)
    return [node for node in fn.calls() if node in reached and node is not root]


def _chosen(arg: Any) -> Any:
    """A size that spoke of a step's T tokens, of the S chosen ones."""
    if not isinstance(arg, Sym) or "T" not in arg.symbols:
        return arg
    return arg.evaluate(lambda name: Sym("S") if name == "T" else Sym(name))
