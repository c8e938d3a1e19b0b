"""Recognise rotary position embeddings, however they are spelled, and make each one op.

Before (llama's spelling; %c2 and %s2 hold every angle twice)::

    %a: f32[B,H,T,8] = aten.mul.Tensor(%q, %c2)
    %n: f32[B,H,T,4] = aten.neg(aten.slice.Tensor(%q, 3, 4, 8))
    %r: f32[B,H,T,8] = aten.cat([%n, aten.slice.Tensor(%q, 3, 0, 4)], -1)
    %b: f32[B,H,T,8] = aten.mul.Tensor(%r, %s2)
    %y: f32[B,H,T,8] = aten.add.Tensor(%a, %b)

After::

    %cos: f32[B,T,4] = aten.slice.Tensor(%c, -1, 0, 4)
    %sin: f32[B,T,4] = aten.slice.Tensor(%s, -1, 0, 4)
    %y: f32[B,H,T,8] = graftwork.rotary(%q, %cos, %sin, interleaved=False)

Models write this in a dozen ways: rotated halves, neighbouring channels, split and stacked, on a
part of the channels, before or after heads and steps trade places. So the pass does not compare
spellings. It starts where a value is multiplied by one that depends on positions only, walks to
the values that the product and its users form, and cuts out the piece between such a value and the
one node that it is made from. The piece is built of moves, sums and products, so it is a
polynomial in its inputs, and two polynomials that agree at a random point are equal (with
probability one): the piece is run in float64 on random numbers and compared with the op. Keeps the
largest piece that agrees. Refuses products that are no rotation (a temperature, a rescaled
rotation); those stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import Function, Program, Sym, TensorType, site_of, type_of
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.subgraph import decided_by
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_each
from .rotary_probe import Piece, Reading, cut, probe

A, G = torch.ops.aten, torch.ops.graftwork
REACH = 24  # calls between the first product and the end of a rotation; the longest known is 9


@register
class RaiseRotary(Pass):
    """No options."""

    provides: ClassVar[frozenset[str]] = frozenset({"rotary"})

    def run(self, program: Program) -> Outcome:
        return edit_each(program, _raise)


def _raise(fn: Function) -> int | str:
    raiser = _Raiser(fn, decided_by(fn, {"positions"}))
    for node in fn.calls(A.mul.Tensor):
        if raiser.starts_at(node):
            raiser.visit(node)
    sweep(fn)
    return raiser.count or raiser.near_miss


@dataclass
class _Raiser:
    fn: Function
    tables: set[torch.fx.Node]
    count: int = 0
    near_miss: str = "nothing is multiplied by a value that depends on the positions alone"
    done: set[torch.fx.Node] = field(default_factory=set)
    known: dict[Any, Reading | None] = field(default_factory=dict)
    halves: dict[Any, torch.fx.Node] = field(default_factory=dict)

    def starts_at(self, node: torch.fx.Node) -> bool:
        """Whether a product, part of no rotation yet, is of data and what positions decide."""
        sides = [arg in self.tables for arg in node.all_input_nodes]
        return node not in self.done and sorted(sides) == [False, True]

    def visit(self, product: torch.fx.Node) -> None:
        """Raise the largest rotation that the product is a part of."""
        best: tuple[Piece, Reading] | None = None
        for end in _chain(product):
            piece = cut(end, self.tables)
            if piece is None:
                continue
            reading = self.read(piece)
            if reading is not None:
                best = piece, reading
        if best is not None:
            self.done |= best[0].nodes
            self.replace(*best)
        else:
            self.near_miss = f"the values made from %{product.name} are no rotation of one value"

    def read(self, piece: Piece) -> Reading | None:
        """What the piece is; layers alike are probed once."""
        key = piece.key()
        if key not in self.known:
            self.known[key] = probe(piece)
        return self.known[key]

    def replace(self, piece: Piece, reading: Reading) -> None:
        """Put one op in place of the piece."""
        self.count += 1
        end, value = piece.end, piece.source
        cos, sin = (self.half(piece.tables[i], piece, reading) for i in reading.tables)
        with self.fn.graph.inserting_before(end):
            value = self.heads_of(value, end, reading)
            if reading.backwards:
                sin = self.call(A.neg.default, end, sin)
            options = {"interleaved": True} if reading.interleaved else {}
            new = self.call(G.rotary.default, end, value, cos, sin, **options)
            if reading.end == "BTHD":
                new = self.call(A.permute.default, end, new, [0, 2, 1, 3])
            if reading.end == "BTD":
                new = self.call(A.reshape.default, end, new, list(type_of(end).dims))
        end.replace_all_uses_with(new)

    def heads_of(self, value: torch.fx.Node, end: torch.fx.Node, reading: Reading) -> torch.fx.Node:
        """The source as [B,H,T,D] in the dtype of the end, its pairs where the op expects them."""
        kind = type_of(value)
        if kind.dtype != type_of(end).dtype:
            value = self.call(A._to_copy.default, end, value, dtype=type_of(end).dtype)
        if reading.source == "BTHD":
            value = self.call(A.permute.default, end, value, [0, 2, 1, 3])
        if reading.source == "BTD":
            dims = [kind.dims[0], 1, *kind.dims[1:]]
            value = self.call(A.reshape.default, end, value, dims)
        if not reading.gathers:
            return value
        stop = 2 * reading.width
        parts = [self.call(A.slice.Tensor, end, value, 3, i, stop, 2) for i in (0, 1)]
        return self.call(A.cat.default, end, parts, 3)

    def half(self, table: torch.fx.Node, piece: Piece, reading: Reading) -> torch.fx.Node:
        """The table [B,T,R] with each angle once, made right after the table for all its users."""
        dtype = type_of(piece.end).dtype
        table = _peeled(table)
        key = (table, reading.take, reading.width, dtype)
        if key not in self.halves:
            with self.fn.graph.inserting_before(table.next):
                self.halves[key] = self.make_half(table, reading, dtype)
        return self.halves[key]

    def make_half(
        self, table: torch.fx.Node, reading: Reading, dtype: torch.dtype
    ) -> torch.fx.Node:
        site, dims = table, list(type_of(table).dims)
        if len(dims) == 4:
            dims.pop(1 if dims[2] == Sym("T") else 2)
            table = self.call(A.reshape.default, site, table, dims)
        if reading.take == "first half":
            table = self.call(A.slice.Tensor, site, table, 2, 0, reading.width)
        elif reading.take == "every other":
            table = self.call(A.slice.Tensor, site, table, 2, 0, 2 * reading.width, 2)
        if type_of(table).dtype != dtype:
            table = self.call(A._to_copy.default, site, table, dtype=dtype)
        return table

    def call(self, target: Any, like: torch.fx.Node, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.fn.call(target, *args, site=site_of(like), **kwargs)


def _peeled(table: torch.fx.Node) -> torch.fx.Node:
    """What was given a head axis to make the table, or the table itself."""
    source = table.args[0] if table.args else table
    if table.target is not A.unsqueeze.default or not isinstance(source, torch.fx.Node):
        return table
    return source if len(type_of(source).dims) == 3 else table


def _chain(product: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The product, the only user of that, the only user of that, ..."""
    node = product
    for _ in range(REACH):
        if not isinstance(node.meta["type"], TensorType):
            return
        yield node
        users = list(node.users)
        if len(users) != 1 or users[0].op != "call_function":
            return
        node = users[0]
