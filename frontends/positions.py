"""Give positions to models that number the tokens of a step themselves.

Before::

    %p = aten.arange.start_step(0, T, 1)             what the model computes from it needs no tokens
    %e = aten.embedding.default(@wpe.weight, %p)     f32[T,H]
    %x = aten.add.Tensor(%tok, %e)

After::

    %e = aten.embedding.default(@position.0, %positions)   f32[B,T,H], @position.0: f32[C,H]
    %x = aten.add.Tensor(%tok, %e)

A value that depends on T but on no token (a slice of a table, an arange, angles) is computed once
for all positions of the context, as a derived weight, and looked up by position where it first
meets the tokens. So a step may begin at any position of each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.fx

from ..ir import Dim, Sym, TensorType, UnsupportedError, Weight, derive, site_of, type_of
from ..ir.rewrite.derived import tabulated_piece
from ..ir.weights import piece
from .importer import Imported
from .regions import evaluated, needed_for, reached_from
from .sites import where

A = torch.ops.aten
T = Sym("T")


def tabulate_positions(imported: Imported, context: int) -> int:
    """Replace position-dependent values in place; returns for how many positions there are rows.

    context: positions to tabulate at most; learned position embeddings may have fewer. Errors:
    `UnsupportedError` for values with T on two axes (masks that no attention took) and for uses
    that are not elementwise.
    """
    fn = imported.fn
    by_tokens = reached_from(fn, fn.input("tokens"))
    by_positions = reached_from(fn, fn.input("positions"))
    numbered = [
        node
        for node in fn.calls()
        if node not in by_tokens and node not in by_positions and _numbers_tokens(node)
    ]
    context = min(
        [
            context,
            *(_rows(imported, node, context) for node in numbered if node.target in _LOOK_UPS),
        ]
    )
    tables = 0
    for node in numbered:
        users = [user for user in node.users if user in by_tokens]
        if users:
            table = _table(imported, node, tables, context)
            tables += 1
            for user in users:
                _look_up(imported, node, user, table)
    fn.graph.eliminate_dead_code()
    return context


HEAD = 512
"""Values a row of a table that may be angles of a head."""

_LOOK_UPS = (A.embedding.default,)


def _rows(imported: Imported, node: torch.fx.Node, context: int) -> int:
    """Positions, up to the context, for which an embedding has rows; the first ones may be
    reserved, and where all tokens share one, nothing ends."""
    table, index = node.args
    rows = evaluated(index, imported.weights, {"B": 1, "T": 2})  # type: ignore[arg-type]
    first, second = rows.flatten()[:2].tolist()
    return context if first == second else int(type_of(table).dims[0]) - first  # type: ignore


def _numbers_tokens(node: torch.fx.Node) -> bool:
    """Whether the value differs from token to token: behind it is an arange or a slice up to T."""
    if not isinstance(node.meta["type"], TensorType) or not _has_tokens(type_of(node)):
        return False
    sources = (A.arange.start_step, A.slice.Tensor)
    region = needed_for(node, {})
    return any(part.target in sources and _has_tokens(type_of(part)) for part in region)


def _has_tokens(value: TensorType) -> bool:
    return any(isinstance(dim, Sym) and "T" in dim.symbols for dim in value.dims)


def _table(imported: Imported, node: torch.fx.Node, index: int, context: int) -> Weight:
    """The value for positions 0..context-1: one row each, the other axes flattened."""
    dims = type_of(node).dims
    if sum(dim == T for dim in dims) != 1 or any(_unclear(dim) for dim in dims):
        raise UnsupportedError(
            f"{where(node)}: {node.target} makes {type_of(node)} from the number of tokens; "
            "expected one value for each position"
        )
    width = math.prod(dim for dim in dims if isinstance(dim, int))
    row = TensorType(type_of(node).dtype, (context, width))
    name = f"position.{index}"
    weight = tabulated_piece(name, row, node, imported.weights, "tokens", dims.index(T))
    weight = _once(weight)
    imported.weights[weight.name] = weight
    return weight


def _once(table: Weight) -> Weight:
    """A table of angles without its second half, if that is the first again: rotations are known by
    that."""
    rows, width = (int(str(dim)) for dim in table.type.dims)
    if width > HEAD or width % 2:
        return table
    values = table.load()
    if not torch.equal(values[:, : width // 2], values[:, width // 2 :]):
        return table
    half = TensorType(table.type.dtype, (rows, width // 2))
    return derive(table.name, half, piece, table, axis=1, start=0, end=width // 2)


def _unclear(dim: Dim) -> bool:
    return isinstance(dim, Sym) and dim not in (T, Sym("B"))


_ELEMENTWISE = (
    A.add.Tensor,
    A.sub.Tensor,
    A.mul.Tensor,
    A.div.Tensor,
    A.where.self,
    A.maximum.default,
    A.minimum.default,
)


def _look_up(imported: Imported, node: torch.fx.Node, user: torch.fx.Node, table: Weight) -> None:
    """Use the table's rows, shaped so that they broadcast as the value did."""
    fn = imported.fn
    dims = type_of(node).dims
    padded: Sequence[Dim] = (1,) * (len(type_of(user).dims) - len(dims)) + dims
    axis = padded.index(T)
    if user.target not in _ELEMENTWISE or axis == 0:
        raise UnsupportedError(
            f"{where(user)}: {user.target} uses a value that depends on positions; expected an "
            "elementwise op on [B,...,T,...]"
        )
    site = site_of(node)
    between, behind = list(padded[1:axis]), list(padded[axis + 1 :])
    with fn.graph.inserting_before(user):
        rows = fn.call(A.embedding.default, fn.weight(table), fn.input("positions"), site=site)
        width = math.prod(int(str(dim)) for dim in (*between, *behind))
        if width == 2 * int(str(table.type.dims[1])):  # see `_once`
            rows = fn.call(A.cat.default, [rows, rows], -1, site=site)
        value = fn.call(A.reshape.default, rows, [Sym("B"), T, *between, *behind], site=site)
        if between:
            order = [0, *range(2, axis + 1), 1, *range(axis + 1, len(padded))]
            value = fn.call(A.permute.default, value, order, site=site)
    user.replace_input_with(node, value)
