"""Which calls of a step may run on tokens in one row, and how values hold them (`pack_tokens`)."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.fx

from ...ir import Function, TensorType, arguments, type_of
from ...ir.types import Sym
from ..fusing.products import product_of

A, G = torch.ops.aten, torch.ops.graftwork
B, T, S, N, M = map(Sym, "BTSNM")

MOVES = frozenset(
    {
        *(A.view.default, A.reshape.default, A.transpose.int, A.permute.default),
        *(A.unsqueeze.default, A.squeeze.dim, A.expand.default, A.slice.Tensor, A.select.int),
        *(A.split.Tensor, A.split_with_sizes.default, A.chunk.default, A.clone.default),
        *(A.cat.default, A._to_copy.default),
    }
)
"""Ops that compute nothing."""

BY_TOKEN = MOVES | {
    *(G.hidden.default, G.rms_norm.default, G.add_rms_norm.default, G.layer_norm.default),
    *(G.glu.default, G.rotary.default, G.moe.default, G.quantized_moe.default),
    *(G.quantized_embedding.default, A.embedding.default, A.layer_norm.default),
    *(A.argmax.default, A.topk.default, A.max.dim, A._softmax.default, A._log_softmax.default),
    *(A.sum.dim_IntList, A.mean.dim, A.amax.default),
    operator.getitem,
}
"""Ops that treat tokens alike and apart, where the types say that their axes stay. Pointwise ones
and products do, too."""

ALONG = {A._softmax.default, A._log_softmax.default, A.topk.default, A.max.dim}
"""Those that work along an axis which their result keeps, or a part of it."""

WORK = frozenset({G.moe.default, G.quantized_moe.default})
"""Those that are work, besides products."""


class Rows(NamedTuple):
    """How a value holds tokens: `columns` of each sequence, which become `total` in one row. batch,
    column: the axes; one axis may be both, B*T, which is `flat`."""

    columns: Sym
    total: Sym
    batch: int
    column: int

    @property
    def flat(self) -> bool:
        return self.batch == self.column


def rows_of(type: Any) -> Rows | None:
    """How a value holds tokens; None: it does not, or in a way that cannot be packed."""
    if not isinstance(type, TensorType) or not _speaks(type.dims):
        return None
    dims = list(type.dims)
    for columns, total in ((T, N), (S, M)):
        for batch, column in ((B, columns), (B * columns, B * columns)):
            others = [dim for dim in dims if dim not in (batch, column)]
            if dims.count(batch) == dims.count(column) == 1 and not _speaks(others):
                return Rows(columns, total, dims.index(batch), dims.index(column))
    return None


def _speaks(dims: Any) -> bool:
    """Whether a size is one of sequences or tokens."""
    sizes = (dim for dim in dims if isinstance(dim, Sym))
    return any(not dim.symbols.isdisjoint({"B", "T", "S"}) for dim in sizes)


def in_one_row(arg: Any) -> Any:
    """A size for packed tokens."""
    if not isinstance(arg, Sym):
        return arg
    return arg.bind({"B": 1, "T": N, "S": M})


def packed_type(type: TensorType) -> TensorType:
    """The type of a value once its tokens are packed."""
    return TensorType(type.dtype, tuple(map(in_one_row, type.dims)))


def works(node: torch.fx.Node) -> bool:
    return product_of(node) is not None or node.target in WORK


def _by_token(node: torch.fx.Node) -> bool:
    """Whether a call may run on packed tokens."""
    target: Any = node.target
    if target is G.pick_rows.default:
        return True
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    if not (pointwise or target in BY_TOKEN or product_of(node)):
        return False
    if target is operator.getitem:
        return rows_of(node.meta["type"]) is not None
    types = [type_of(arg) for arg in node.all_input_nodes]
    held = [rows_of(type) for type in types]
    if any(rows is None and _speaks(type.dims) for rows, type in zip(held, types, strict=True)):
        return False
    if len({rows.columns for rows in held if rows}) != 1:
        return False  # of no tokens, or of two kinds
    result = node.meta["type"]
    made = list(map(rows_of, result if isinstance(result, tuple) else (result,)))
    if None in made:
        return False
    first = next(rows for rows in held if rows)
    if target in (A.view.default, A.reshape.default):
        return all(rows.batch == 0 and rows.column <= 1 for rows in (first, made[0]) if rows)
    if target is A.layer_norm.default and _speaks(arguments(node)["normalized_shape"]):
        return False
    if target in ALONG:
        axis = arguments(node)["dim"] % len(types[0].dims)
        return axis not in (first.batch, first.column)
    return True


def together(fn: Function) -> set[torch.fx.Node]:
    """The calls that run on packed tokens: work, what it is made of, and what is made of it; not
    what only prepares operands of the others, or moves their results."""
    may = {node for node in fn.calls() if _by_token(node)}
    chosen: set[torch.fx.Node] = set()
    for node in reversed(fn.calls()):
        users = [user for user in node.users if user.op != "output"]
        alone = users and chosen.isdisjoint(users) and node.target is not G.pick_rows.default
        if node in may and (works(node) or not alone):
            chosen.add(node)
    for node in fn.calls():
        if node not in chosen:
            continue
        if node.target is operator.getitem:
            if node.args[0] not in chosen:
                chosen.discard(node)
        elif node.target in MOVES and not any(arg in chosen for arg in node.all_input_nodes):
            chosen.discard(node)
    # Results of one call are packed together.
    return chosen | {node for node in fn.calls(operator.getitem) if node.args[0] in chosen}
