"""Look up what depends only on the token's position in a table instead of computing it each step.

Before::

    %p: f32[B,T,1] = aten._to_copy(aten.unsqueeze(%positions, 2), dtype=f32)
    %f: f32[B,T,4] = aten.mul.Tensor(%p, @inv_freq)
    %c: f32[B,T,4] = aten.cos(%f)

After (context 2048)::

    weight positions.cos: f32[2048,4]
    %c: f32[B,T,4] = aten.embedding(@positions.cos, %positions)

Row p of the table is the value at position p, bit for bit: when the weight is loaded, the cut-out
calls run on positions 0 .. context - 1. Cuts at the last value of a chain whose last axes are of
fixed size. Refuses values that mix positions of different tokens (a maximum over the step, as in
rotary embeddings that rescale with length), tables over `limit` bytes, and leaves learned position
embeddings alone, which are such a lookup already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ...ir import Function, Program, Sym, TensorType, Weight, WeightStore, cone, site_of, type_of
from ...ir.rewrite.cleanup import merge_equal, sweep
from ...ir.rewrite.derived import tabulated_piece
from ...ir.rewrite.subgraph import decided_by, fresh_name
from ...ir.types import Dim, make_dim
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_with_weights

A = torch.ops.aten
INPUT = "positions"


@register
class TabulatePositions(Pass):
    """limit: the largest table, in bytes."""

    limit: int = 1 << 29

    # A rotation is recognised by how its tables are made, so they must not be tables yet.
    requires: ClassVar[frozenset[str]] = frozenset({"rotary"})

    def run(self, program: Program) -> Outcome:

        def edit(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
            if not fn.has_input(INPUT):
                return "", weights
            merge_equal(fn)
            tables = _Tables(fn, weights, program.info.context, self.limit, PerToken.of(fn, INPUT))
            found = [(node, tables.table(node)) for node in tables.candidates()]
            for node, weight in found:
                tables.replace(node, weight)
            sweep(fn)
            miss = tables.near_miss or f"no value depends on {INPUT} alone"
            return len(found) or miss, tables.weights

        return edit_with_weights(program, edit)


@dataclass
class _Tables:
    """The tables of one function (a copy). rows: positions that there are."""

    fn: Function
    weights: WeightStore
    rows: int
    limit: int
    own: PerToken
    near_miss: str = ""

    def candidates(self) -> list[torch.fx.Node]:
        """The last values of position-only chains that are no lookup yet and not too large."""
        self.near_miss = self.own.near_miss
        return [node for node in self.own.last() if self._fits(node)]

    def _fits(self, node: torch.fx.Node) -> bool:
        if node.target is A.embedding.default and node.args[1] is self.own.input:
            self.near_miss = "the only position-only values are learned embeddings"
            return False
        size = self.rows * _row(type_of(node)) * type_of(node).dtype.itemsize
        if size > self.limit:
            self.near_miss = f"the table of %{node.name} would take {size} bytes"
        return size <= self.limit

    def replace(self, node: torch.fx.Node, weight: Weight) -> None:
        """Put a lookup in a node's place; the lookup brings its axes into the node's order."""
        value, site = type_of(node), site_of(node)
        batch, step = axis_of(value, "B"), axis_of(value, "T")
        order = [batch, step, *(a for a in range(len(value.dims)) if a not in (batch, step))]
        dims = [value.dims[axis] for axis in order]
        moved = [axis for axis in order if value.dims[axis] != 1]
        if moved == sorted(moved):  # a reshape puts axes of size 1 anywhere
            order, dims = sorted(order), list(value.dims)
        with self.fn.graph.inserting_before(node):
            table, positions = self.fn.weight(weight), self.fn.input(INPUT)
            new = self.fn.call(A.embedding.default, table, positions, site=site)
            if list(type_of(new).dims) != dims:
                new = self.fn.call(A.reshape.default, new, dims, site=site)
            if order != sorted(order):
                back = [order.index(axis) for axis in range(len(order))]
                new = self.fn.call(A.permute.default, new, back, site=site)
        node.replace_all_uses_with(new)

    def table(self, node: torch.fx.Node) -> Weight:
        """The weight whose row p is the node's value at position p, computed when it is loaded."""
        value = type_of(node)
        name = fresh_name(self.weights, f"positions.{_kind(node)}")
        type = TensorType(value.dtype, (self.rows, _row(value)))
        made = tabulated_piece(name, type, node, self.weights, INPUT, axis_of(value, "T"))
        table = self.weights.alike(made)
        self.weights = self.weights.adding(table)
        return table


def _kind(node: torch.fx.Node) -> str:
    """What the value is at heart, for the table's name: a cosine, a sine, or its last op."""
    seen = sorted(cone([node]), reverse=True)
    wave = [n for n in seen if n.target in (A.cos.default, A.sin.default)]
    return str((wave or seen)[0].target).removeprefix("aten.").partition(".")[0].strip("_")


def _row(value: TensorType) -> int:
    return math.prod(dim for dim in value.dims if isinstance(dim, int))


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
        separate = op in MOVES | COMPUTES and (op in SHAPED or not sizes_in(node.args))
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
        return not sizes_in((node.args, node.kwargs))

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


def sizes_in(args: Any) -> list[Sym]:
    """The symbolic sizes in the arguments of a call."""
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
