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
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx

from ...ir import Function, Program, TensorType, Weight, WeightStore, cone, site_of, type_of
from ...ir.rewrite.cleanup import merge_equal, sweep
from ...ir.rewrite.derived import tabulated_piece
from ...ir.rewrite.subgraph import fresh_name
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_with_weights
from .per_token import PerToken, axis_of

A = torch.ops.aten
INPUT = "positions"


@register
class TabulatePositions(Pass):
    """limit: the largest table, in bytes."""

    limit: int = 1 << 29

    name: ClassVar[str] = "tabulate_positions"
    # A rotation is recognised by how its tables are made, so they must not be tables yet.
    requires: ClassVar[frozenset[str]] = frozenset({"rotary"})
    provides: ClassVar[frozenset[str]] = frozenset({"position_tables"})

    def run(self, program: Program) -> Outcome:
        """Replace position-only values by lookups, in every function. See the module docstring."""

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
