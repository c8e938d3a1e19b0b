"""Recognise the middle of gated feed-forward blocks.

Before::

    %a: f32[B,T,8] = aten.silu(%gate)
    %y: f32[B,T,8] = aten.mul.Tensor(%a, %up)

After::

    %y: f32[B,T,8] = graftwork.glu(%gate, %up, activation="silu")

for silu, gelu (exact and tanh), relu and sigmoid, factors in either order; `raise_activations`
finds activations that are spelled as formulas. Leaves alone a gate of another type than what it
gates (one number a token), an activation that is used beside the product, and an activation times
its own argument.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import Function, Program, site_of, type_of
from ...ir.rewrite.cleanup import sweep
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_each

A, G = torch.ops.aten, torch.ops.graftwork
NAMES: dict[Any, str] = {
    A.silu.default: "silu",
    A.relu.default: "relu",
    A.sigmoid.default: "sigmoid",
}


@register
class RaiseGatedMlp(Pass):
    """No options."""

    provides: ClassVar[frozenset[str]] = frozenset({"glu"})

    def run(self, program: Program) -> Outcome:
        return edit_each(program, _raise)


def _raise(fn: Function) -> int | str:
    count, near_miss = 0, "nothing multiplies an activation with another value"
    for node in fn.calls(A.mul.Tensor):
        found = _read(node)
        if isinstance(found, str):
            near_miss = found or near_miss
            continue
        activation, gate, up = found
        with fn.graph.inserting_before(node):
            new = fn.call(G.glu.default, gate, up, activation=activation, site=site_of(node))
        node.replace_all_uses_with(new)
        count += 1
    sweep(fn)
    return count or near_miss


def _read(product: torch.fx.Node) -> tuple[str, torch.fx.Node, torch.fx.Node] | str:
    """(activation, gate, up) of a product; else why it is none ("" where it is not even near)."""
    reason = ""
    factors = [arg for arg in product.args if isinstance(arg, torch.fx.Node)]
    if len(factors) != 2:
        return reason
    for activated, up in (factors, factors[::-1]):
        activation = _activation(activated)
        if activation is None:
            continue
        gate = activated.all_input_nodes[0]
        if up in (activated, gate):
            reason = f"%{product.name} multiplies an activation with its own argument"
        elif type_of(gate) != type_of(up):
            reason = f"%{product.name}: gate {type_of(gate)}, but it gates {type_of(up)}"
        elif len(activated.users) > 1:
            reason = f"%{activated.name} is used beside the product %{product.name}"
        else:
            return activation, gate, up
    return reason


def _activation(node: torch.fx.Node) -> str | None:
    if node.target is not A.gelu.default:
        return NAMES.get(node.target)
    approximate = node.kwargs.get("approximate", [*node.args, "none"][1])
    return "gelu_tanh" if approximate == "tanh" else "gelu"
