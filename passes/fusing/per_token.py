"""Which values of a step are each token's own: computed from that token's position alone.

Used by `tabulate_positions`, which see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ...ir import Function, Sym, TensorType, cone, type_of
from ...ir.rewrite.subgraph import decided_by
from ...ir.types import Dim, make_dim

A = torch.ops.aten

# Ops that compute each token's value from that token alone, as long as the result still has the
# batch and step axes; of lookups that holds for the index, and of reshapes if both axes stay put.
MOVES = frozenset(
    {
        *("alias", "cat", "clone", "constant_pad_nd", "expand", "getitem", "permute", "repeat"),
        *("select", "slice", "split", "split_with_sizes", "squeeze", "stack", "transpose"),
        *("unbind", "unsqueeze", "_to_copy"),
    }
)
COMPUTES = frozenset(
    {
        *("abs", "add", "bitwise_and", "bitwise_not", "bmm", "ceil", "clamp", "cos", "div", "eq"),
        *("exp", "floor", "full_like", "ge", "gt", "le", "log", "log1p", "logical_and"),
        *("logical_not", "logical_or", "lt", "matmul", "maximum", "minimum", "mul", "ne", "neg"),
        *("pow", "reciprocal", "remainder", "rsqrt", "rsub", "sin", "sqrt", "sub", "tanh", "where"),
    }
)
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})
RESHAPES = frozenset({"reshape", "view", "_unsafe_view"})
SHAPED = frozenset({"expand", "slice"})  # their sizes are sizes of the result, not values


@dataclass
class PerToken:
    """The values that a table by position can stand for.

    values: computed from the input alone, each token's part from that token's entry. near_miss: the
    last value that is computed from the input alone and yet not one of them.
    """

    fn: Function
    input: torch.fx.Node
    values: set[torch.fx.Node] = field(default_factory=set)
    fixed: set[torch.fx.Node] = field(default_factory=set)
    near_miss: str = ""

    @classmethod
    def of(cls, fn: Function, input: str) -> PerToken:
        """Classify the values of a function."""
        found = cls(fn, fn.input(input))
        found.values.add(found.input)
        decided = decided_by(fn, {input})
        for node in fn:
            if node.op == "get_attr" or (node.op == "call_function" and found.is_fixed(node)):
                found.fixed.add(node)
            elif node in decided and node is not found.input:
                found.classify(node)
        return found

    def classify(self, node: torch.fx.Node) -> None:
        """Add a value if its op keeps tokens apart."""
        op, source = op_of_call(node), node.all_input_nodes[0]
        known = all(arg in self.values or arg in self.fixed for arg in node.all_input_nodes)
        separate = op in MOVES | COMPUTES and (op in SHAPED or not _sizes(node.args))
        separate = separate or (op in LOOKUPS and source in self.fixed)
        separate = separate or (op in RESHAPES and _axes_stay(type_of(source), type_of(node)))
        if known and separate and _has_step(node):
            self.values.add(node)
        else:
            self.near_miss = f"%{node.name} ({node.target}) may mix the positions of tokens"

    def is_fixed(self, node: torch.fx.Node) -> bool:
        """Whether a call gives the same for every step and token: weights, perhaps repeated."""
        if any(arg not in self.fixed for arg in node.all_input_nodes):
            return False
        if node.target in (A.full.default, A.expand.default):
            return not isinstance(node.args[1], Sym)
        return not _sizes((node.args, node.kwargs))

    def last(self) -> list[torch.fx.Node]:
        """Floating values that something else reads, and that take computing."""
        return [node for node in self.fn.calls() if node in self.values and self._is_last(node)]

    def _is_last(self, node: torch.fx.Node) -> bool:
        value = node.meta["type"]
        if not isinstance(value, TensorType) or not value.dtype.is_floating_point:
            return False
        rest = [dim for dim in value.dims if dim not in (Sym("B"), Sym("T"))]
        if any(isinstance(dim, Sym) for dim in rest):
            return False
        if all(user in self.values for user in node.users):
            return False
        return any(op_of_call(n) in COMPUTES | LOOKUPS for n in cone([node]))


def op_of_call(node: torch.fx.Node) -> str:
    """The op's name without its overload."""
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def _sizes(args: Any) -> list[Sym]:
    found: list[Sym] = []
    map_aggregate(args, lambda arg: found.append(arg) if isinstance(arg, Sym) else None)
    return found


def _has_step(node: torch.fx.Node) -> bool:
    """Whether a value has one batch and one step axis (pairs of tokens have two of those)."""
    value = node.meta["type"]
    items = [value] if isinstance(value, TensorType) else value
    return all(axis_of(item, "B") >= 0 and axis_of(item, "T") >= 0 for item in items)


def _axes_stay(before: TensorType, after: TensorType) -> bool:
    """Whether a reshape leaves every token's elements at that token."""
    outer = [[_outer(value, symbol) for symbol in "BT"] for value in (before, after)]
    return outer[0] == outer[1]


def _outer(value: TensorType, symbol: str) -> Dim:
    dims = value.dims[: max(axis_of(value, symbol), 0)]
    return make_dim("*".join(f"({dim})" for dim in dims) or "1")


def axis_of(value: TensorType, symbol: str) -> int:
    """Which axis has this size; -1 if none or several have."""
    axes = [axis for axis, dim in enumerate(value.dims) if dim == Sym(symbol)]
    return axes[0] if len(axes) == 1 else -1
