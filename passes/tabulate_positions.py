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

from ..ir import Function, Program, Sym, TensorType, Weight, derive, site_of, type_of
from ..ir.types import Dim, make_dim
from .base import Outcome, Pass, register
from .cse import merge_equal
from .dce import sweep
from .subgraph import cone, decided_by, evaluate, extract, fresh_name

A = torch.ops.aten
INPUT = "positions"

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


@register
class TabulatePositions(Pass):
    """limit: the largest table, in bytes."""

    limit: int = 1 << 29

    name: ClassVar[str] = "tabulate_positions"
    provides: ClassVar[frozenset[str]] = frozenset({"position_tables"})

    def run(self, program: Program) -> Outcome:
        """Replace position-only values of ``step`` by lookups. See the module docstring."""
        fn = program.function("step").copy()
        if not fn.has_input(INPUT):
            return Outcome(program, 0, f"step has no input {INPUT!r}")
        merge_equal(fn)
        tables = _Tables(program, fn, self.limit)
        found = [(node, tables.table(node)) for node in tables.candidates()]
        for node, weight in found:
            tables.replace(node, weight)
        if not tables.made:
            return Outcome(program, 0, tables.near_miss)
        sweep(fn)
        weights = program.weights.adding(*tables.made)
        return Outcome(program.with_function(fn, weights=weights).pruned(), len(tables.made))


@dataclass
class _Tables:
    program: Program
    fn: Function
    limit: int
    made: list[Weight] = field(default_factory=list)
    near_miss: str = "no value depends on the positions alone"

    def candidates(self) -> list[torch.fx.Node]:
        """The last nodes of position-only chains that a table can replace."""
        apart, fixed = {self.fn.input(INPUT)}, set[torch.fx.Node]()
        decided = decided_by(self.fn, {INPUT})
        for node in self.fn:
            if node.op == "get_attr" or (node.op == "call_function" and _is_fixed(node, fixed)):
                fixed.add(node)
            elif node in decided and node not in apart:
                self._classify(node, apart, fixed)
        return [n for n in self.fn.calls() if n in apart and self._is_last(n, apart)]

    def _classify(
        self, node: torch.fx.Node, apart: set[torch.fx.Node], fixed: set[torch.fx.Node]
    ) -> None:
        op, source = _op(node), node.all_input_nodes[0]
        known = all(arg in apart or arg in fixed for arg in node.all_input_nodes)
        separate = op in MOVES | COMPUTES and (op in SHAPED or not _sizes(node.args))
        separate = separate or (op in LOOKUPS and source in fixed)
        separate = separate or (op in RESHAPES and _axes_stay(type_of(source), type_of(node)))
        if known and separate and _has_step(node):
            apart.add(node)
        else:
            self.near_miss = f"%{node.name} ({node.target}) may mix the positions of tokens"

    def _is_last(self, node: torch.fx.Node, apart: set[torch.fx.Node]) -> bool:
        if not isinstance(node.meta["type"], TensorType):
            return False
        if node.target is A.embedding.default and node.args[1] is self.fn.input(INPUT):
            self.near_miss = "the only position-only values are learned embeddings"
            return False
        floating = type_of(node).dtype.is_floating_point
        if not floating or all(user in apart for user in node.users):
            return False
        if not any(_op(n) in COMPUTES | LOOKUPS for n in cone([node])):
            return False  # the positions themselves, in another shape or dtype
        return self._fits(node)

    def _fits(self, node: torch.fx.Node) -> bool:
        size = self.program.info.context * _row(type_of(node)) * type_of(node).dtype.itemsize
        if size > self.limit:
            self.near_miss = f"the table of %{node.name} would take {size} bytes"
        return size <= self.limit

    def replace(self, node: torch.fx.Node, weight: Weight) -> None:
        """Put a lookup in a node's place; the lookup brings its axes into the node's order."""
        value, site = type_of(node), site_of(node)
        batch, step = _axis(value, "B"), _axis(value, "T")
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
        piece, rows = extract(self.fn, {"value": node}), self.program.info.context
        value, names = type_of(node), sorted(piece.weights)
        step = _axis(value, "T")

        def compute(*tensors: torch.Tensor) -> torch.Tensor:
            inputs = {INPUT: torch.arange(rows)[None]}
            found = evaluate(piece, dict(zip(names, tensors, strict=True)), inputs)["value"]
            return found.movedim(step, 0).reshape(rows, -1)

        taken = {*self.program.weights, *(w.name for w in self.made)}
        name = fresh_name(taken, f"positions.{_kind(node)}")
        table = TensorType(value.dtype, (rows, _row(value)))
        self.made.append(derive(name, table, compute, *(self.program.weights[n] for n in names)))
        return self.made[-1]


def _kind(node: torch.fx.Node) -> str:
    """What the value is at heart, for the table's name: a cosine, a sine, or its last op."""
    seen = sorted(cone([node]), reverse=True)
    wave = [n for n in seen if n.target in (A.cos.default, A.sin.default)]
    return str((wave or seen)[0].target).removeprefix("aten.").partition(".")[0].strip("_")


def _op(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def _sizes(args: Any) -> list[Sym]:
    found: list[Sym] = []
    map_aggregate(args, lambda arg: found.append(arg) if isinstance(arg, Sym) else None)
    return found


def _is_fixed(node: torch.fx.Node, fixed: set[torch.fx.Node]) -> bool:
    """Whether a call gives the same for every step and token: from weights, perhaps repeated."""
    if any(arg not in fixed for arg in node.all_input_nodes):
        return False
    if node.target in (A.full.default, A.expand.default):
        return not isinstance(node.args[1], Sym)
    return not _sizes((node.args, node.kwargs))


def _has_step(node: torch.fx.Node) -> bool:
    """Whether a value has one batch and one step axis (pairs of tokens have two of those)."""
    value = node.meta["type"]
    items = [value] if isinstance(value, TensorType) else value
    return all(_axis(item, "B") >= 0 and _axis(item, "T") >= 0 for item in items)


def _axes_stay(before: TensorType, after: TensorType) -> bool:
    """Whether a reshape leaves every token's elements at that token."""
    outer = [[_outer(value, symbol) for symbol in "BT"] for value in (before, after)]
    return outer[0] == outer[1]


def _outer(value: TensorType, symbol: str) -> Dim:
    dims = value.dims[: max(_axis(value, symbol), 0)]
    return make_dim("*".join(f"({dim})" for dim in dims) or "1")


def _axis(value: TensorType, symbol: str) -> int:
    axes = [axis for axis, dim in enumerate(value.dims) if dim == Sym(symbol)]
    return axes[0] if len(axes) == 1 else -1


def _row(value: TensorType) -> int:
    return math.prod(dim for dim in value.dims if isinstance(dim, int))
