"""Turn what is computed from weights alone into weights that are computed once, when loaded.

Before::

    %s: f32[8] = aten.add.Tensor(@norm.weight, 1.0)
    %y: f32[B,T,8] = aten.mul.Tensor(%x, %s)

After::

    weight norm.weight.add: f32[8]
    %y: f32[B,T,8] = aten.mul.Tensor(%x, @norm.weight.add)

Nothing is computed by the pass itself: the new weight runs the cut-out calls with the reference
interpreter on the day somebody loads it. A call whose result is larger than all that it reads (an
expanded vector, a filled matrix) stays, unless it is within `limit` bytes. Refuses nothing: calls
that need an input, have a symbolic size or draw random numbers stay as well.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.fx

from ...ir import Function, Program, Sym, TensorType, Weight, WeightStore, cone
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.derived import evaluated_piece
from ...ir.rewrite.subgraph import fresh_name
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_with_weights
from .tabulate_positions import sizes_in


@register
class FoldConstants(Pass):
    """limit: results up to this many bytes are folded even if they are larger than their inputs."""

    limit: int = 65536

    def run(self, program: Program) -> Outcome:
        return edit_with_weights(program, partial(_fold, limit=self.limit))


def _fold(fn: Function, weights: WeightStore, limit: int) -> tuple[int | str, WeightStore]:
    constant = _constants(fn, weights, limit)
    roots = [n for n in fn.calls() if n in constant and any(u not in constant for u in n.users)]
    folded = 0
    for node in roots:
        if not isinstance(node.meta["type"], TensorType):
            continue  # its items are roots themselves
        weight = folded_weight(fn, node, weights)
        weights = weights.adding(weight)
        with fn.graph.inserting_before(node):
            node.replace_all_uses_with(fn.weight(weight))
        folded += 1
    sweep(fn)
    return folded or "no call reads weights and numbers only", weights


def folded_weight(fn: Function, node: torch.fx.Node, weights: WeightStore) -> Weight:
    """The value of a node that depends on no input, as a weight under a new name, or the one that
    has it already."""
    names = sorted(str(part.target) for part in cone([node]) if part.op == "get_attr")
    op = "item" if node.target is operator.getitem else str(node.target).split(".")[1].strip("_")
    name = fresh_name(weights, f"{names[0] if names else 'constant'}.{op}")
    return weights.alike(evaluated_piece(name, node, weights))


def _constants(
    fn: Function, weights: Mapping[str, Weight], limit: int
) -> dict[torch.fx.Node, frozenset[str]]:
    """Nodes to compute ahead, each with the weights that it is computed from."""
    known: dict[torch.fx.Node, frozenset[str]] = {}
    for node in fn:
        if node.op == "get_attr":
            known[node] = frozenset({str(node.target)})
        elif node.op == "call_function" and all(arg in known for arg in node.all_input_nodes):
            sources = frozenset[str]().union(*(known[arg] for arg in node.all_input_nodes))
            if _is_deterministic(node) and _size(node.meta["type"]) <= max(
                limit, sum(_size(weights[name].type) for name in sources)
            ):
                known[node] = sources
    return known


def _is_deterministic(node: torch.fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return not sizes_in((node.args, node.kwargs)) and torch.Tag.nondeterministic_seeded not in tags


def _symbolic(value: Any) -> bool:
    if isinstance(value, TensorType):
        return any(isinstance(dim, Sym) for dim in value.dims)
    return any(_symbolic(item) for item in value)


def _size(value: Any) -> float:
    if isinstance(value, TensorType):
        return float("inf") if _symbolic(value) else value.nbytes
    return sum(_size(item) for item in value)
