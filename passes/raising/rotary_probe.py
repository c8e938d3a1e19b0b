"""Is this piece of a graph a rotation? Cut it out, run it on random numbers, compare with the op.

Used by `raise_rotary`, which see.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ...ir import Sym, TensorType, type_of
from ...ir.ops.rotary import rotary

A = torch.ops.aten
LIMIT = 64  # nodes in a piece
SIZES = {"B": 2, "T": 3}

CASTS = frozenset({A._to_copy.default, A.to.dtype, A.clone.default, A.alias.default})
MOVES = frozenset(
    {
        *(A.view.default, A.reshape.default, A._unsafe_view.default, A.permute.default),
        *(A.transpose.int, A.unsqueeze.default, A.squeeze.dim, A.squeeze.dims, A.expand.default),
        *(A.slice.Tensor, A.select.int, A.cat.default, A.stack.default, A.unbind.int),
        *(A.split.Tensor, A.split_with_sizes.default, A.chunk.default, operator.getitem),
        *(A.neg.default, A.repeat.default, A.flip.default, A.roll.default),
    }
)
SUMS = frozenset({A.add.Tensor, A.sub.Tensor})
IN_TABLE = MOVES | CASTS | frozenset({A.cos.default, A.sin.default})


@dataclass(frozen=True)
class Piece:
    """The calls between `source` and `end`, and the distinct tables that they multiply by.

    order: calls in order, those that make the tables from `leaves` first, `end` last.
    """

    source: torch.fx.Node
    end: torch.fx.Node
    tables: tuple[torch.fx.Node, ...]
    leaves: tuple[torch.fx.Node, ...]
    order: tuple[torch.fx.Node, ...]

    @property
    def nodes(self) -> set[torch.fx.Node]:
        """The calls of the piece."""
        return set(self.order)

    def key(self) -> Hashable:
        """Equal for pieces that differ in names only."""
        given = (self.source, *self.leaves)
        number: dict[Any, Any] = {n: i for i, n in enumerate((*given, *self.order))}
        calls = [
            (n.target, str(map_aggregate((n.args, n.kwargs), lambda a: number.get(a, a))))
            for n in self.order
        ]
        types = [str(type_of(node)) for node in given]
        return (*types, *calls, *(number[table] for table in self.tables))


@dataclass(frozen=True)
class Reading:
    """How a piece is a rotation. tables: indices of cosine and sine among the piece's tables.

    take: how to get the angles once ("all", "first half", "every other"); width: how many.
    gathers: whether pairs that are neighbours in the source are a half apart at the end.
    backwards: whether the angles are negative. source, end: their layouts (see `layout_of`).
    """

    tables: tuple[int, int]
    take: str
    width: int
    interleaved: bool
    gathers: bool
    backwards: bool
    source: str
    end: str


# interleaved, gathers, backwards
SPELLINGS = [
    (interleaved, gathers, backwards)
    for backwards in (False, True)
    for interleaved, gathers in ((False, False), (True, False), (False, True))
]


def cut(end: torch.fx.Node, tables: set[torch.fx.Node]) -> Piece | None:
    """The piece that ends at a node: up to the nearest single value that all of it is made from.

    `tables` are the nodes that positions decide. None where the way up leaves the allowed ops.
    """
    pending, inside, used = {end}, list[torch.fx.Node](), list[torch.fx.Node]()
    while True:
        node = max(pending)
        pending.remove(node)
        if not pending and node is not end and used and layout_of(node):
            break
        parents = _parents(node, tables)
        if parents is None or len(inside) > LIMIT:
            return None
        inside.append(node)
        used += [arg for arg in node.all_input_nodes if arg in tables]
        pending |= parents
        if not pending:
            return None
    distinct = tuple(sorted(set(used)))
    making, leaves = _table_cone(distinct)
    return Piece(node, end, distinct, leaves, (*making, *reversed(inside)))


def _parents(node: torch.fx.Node, tables: set[torch.fx.Node]) -> set[torch.fx.Node] | None:
    """The data that a call reads, or None if the call is not one of a rotation's."""
    data = {arg for arg in node.all_input_nodes if arg not in tables}
    if node.target in MOVES or node.target in CASTS or node.target in SUMS:
        return data if len(data) == len(node.all_input_nodes) else None
    product = node.target is A.mul.Tensor and len(data) == 1 and len(node.all_input_nodes) == 2
    return data if product else None


def _table_cone(
    tables: tuple[torch.fx.Node, ...],
) -> tuple[tuple[torch.fx.Node, ...], tuple[torch.fx.Node, ...]]:
    """Calls that make the tables, in order, and the values (random in the probe) they need."""
    making: set[torch.fx.Node] = set()
    leaves: set[torch.fx.Node] = set()
    stack = list(tables)
    while stack:
        node = stack.pop()
        if node in making or node in leaves:
            continue
        scaled = node.target is A.mul.Tensor and len(node.all_input_nodes) == 1
        if node.op == "call_function" and (node.target in IN_TABLE or scaled):
            making.add(node)
            stack.extend(node.all_input_nodes)
        else:
            leaves.add(node)
    return tuple(sorted(making)), tuple(sorted(leaves))


def probe(piece: Piece) -> Reading | None:
    """How the piece is a rotation of its source, or None if it is not."""
    layouts = layout_of(piece.source), layout_of(piece.end)
    if "" in layouts or not all(isinstance(n.meta["type"], TensorType) for n in piece.leaves):
        return None
    generator = torch.Generator().manual_seed(0)
    values: dict[torch.fx.Node, Any] = {}
    for node in (piece.source, *piece.leaves):
        shape = type_of(node).bind(SIZES).shape
        values[node] = torch.randn(shape, dtype=torch.float64, generator=generator)
    for node in piece.order:
        values[node] = _run(node, values)
    x, y = (_heads(values[n], layout_of(n)) for n in (piece.source, piece.end))
    tables = [_per_token(values[table], type_of(table)) for table in piece.tables]
    for pair in itertools.permutations(range(len(tables)), 2):
        for take, spelling in itertools.product(("all", "first half", "every other"), SPELLINGS):
            cos, sin = (_take(tables[i], take) for i in pair)
            if cos is not None and sin is not None and _agrees(x, y, cos, sin, spelling):
                return Reading(pair, take, cos.shape[-1], *spelling, *layouts)
    return None


def _agrees(
    x: torch.Tensor,
    y: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    spelling: tuple[bool, bool, bool],
) -> bool:
    interleaved, gathers, backwards = spelling
    width = 2 * cos.shape[-1]
    if cos.shape != sin.shape or width > x.shape[-1] or (gathers and width != x.shape[-1]):
        return False
    if gathers:
        x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    expected = rotary(x, cos, -sin if backwards else sin, interleaved=interleaved)
    return expected.shape == y.shape and torch.allclose(expected, y, rtol=1e-9, atol=1e-9)


def _take(table: torch.Tensor | None, take: str) -> torch.Tensor | None:
    if table is None or take == "all":
        return table
    if table.shape[-1] % 2:
        return None
    return table[..., : table.shape[-1] // 2] if take == "first half" else table[..., ::2]


def _per_token(value: torch.Tensor, kind: TensorType) -> torch.Tensor | None:
    """A table as [B,T,R] (or [1,T,R]), or None if it has a head axis of its own."""
    if value.dim() != 4:
        return value if value.dim() == 3 and kind.dims[1] == Sym("T") else None
    axis = 1 if kind.dims[2] == Sym("T") else 2
    return value.squeeze(axis) if value.shape[axis] == 1 else None


def layout_of(node: torch.fx.Node) -> str:
    """ "BHTD", "BTHD" or "BTD" (one head), by the place of the step axis; "" for anything else."""
    kind = node.meta["type"]
    if not isinstance(kind, TensorType):
        return ""
    dims = ["T" if dim == Sym("T") else "." for dim in kind.dims]
    found = {"..T.": "BHTD", ".T..": "BTHD", ".T.": "BTD"}.get("".join(dims), "")
    return found if found and isinstance(kind.dims[-1], int) else ""


def _heads(value: torch.Tensor, layout: str) -> torch.Tensor:
    """The value as [B,H,T,D]."""
    if layout == "BTD":
        return value[:, None]
    return value if layout == "BHTD" else value.transpose(1, 2)


def _run(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    if node.target in CASTS:
        return values[node.all_input_nodes[0]]

    def value(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return values[arg]
        return arg.evaluate(SIZES.__getitem__) if isinstance(arg, Sym) else arg

    target: Any = node.target
    if target in (A.view.default, A._unsafe_view.default):
        target = A.reshape.default  # casts and copies are left out, so strides may differ
    return target(*map_aggregate(node.args, value), **map_aggregate(node.kwargs, value))
