"""Rows of ops that move, copy, choose or make elements without computing on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import mul
from typing import Any

import onnx_ir as oir
import torch

from ...ir import Dim
from .emit import Emitter, row, type_of
from .rows_elementwise import operand

A = torch.ops.aten
I64 = torch.int64
_FAR = 2**62  # slices that end this far out mean "to the end"


def _dims(x: oir.Value) -> tuple[Dim, ...]:
    return type_of(x).dims


def _axis(axis: int, rank: int) -> int:
    return axis % rank if rank else 0


def _axes(e: Emitter, axes: Sequence[int], rank: int) -> oir.Value:
    return e.const([_axis(a, rank) for a in axes], I64)


# -- the same elements in other dims


@row(
    A.view.default,
    A.reshape.default,
    A._unsafe_view.default,
    A.flatten.using_ints,
    A.unflatten.int,
    A.view_as.default,
)
def reshape(e: Emitter, x: oir.Value, *_: Any) -> Any:
    return e.reshape(x, _dims(x), e.type().dims)


@row(A.unsqueeze.default)
def unsqueeze(e: Emitter, x: oir.Value, dim: int) -> Any:
    return e.op("Unsqueeze", x, _axes(e, [dim], len(_dims(x)) + 1))


@row(A.squeeze.dim, A.squeeze.dims, A.squeeze.default)
def squeeze(e: Emitter, x: oir.Value, dim: Any = None) -> Any:
    rank = len(_dims(x))
    wanted = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = [a for a in (_axis(d, rank) for d in wanted) if _dims(x)[a] == 1]
    return e.op("Squeeze", x, _axes(e, ones, rank)) if ones else x


@row(A.permute.default)
def permute(e: Emitter, x: oir.Value, dims: Sequence[int]) -> Any:
    return e.op("Transpose", x, perm=[_axis(d, len(dims)) for d in dims])


@row(A.transpose.int)
def transpose(e: Emitter, x: oir.Value, dim0: int, dim1: int) -> Any:
    rank = len(_dims(x))
    order = list(range(rank))
    a, b = _axis(dim0, rank), _axis(dim1, rank)
    order[a], order[b] = order[b], order[a]
    return e.op("Transpose", x, perm=order) if a != b else x


@row(A.t.default, A.numpy_T.default)
def reverse_axes(e: Emitter, x: oir.Value) -> Any:
    rank = len(_dims(x))
    return e.op("Transpose", x, perm=list(range(rank))[::-1]) if rank > 1 else x


# -- repetition


@row(A.expand.default, A.broadcast_to.default, A.expand_as.default)
def expand(e: Emitter, x: oir.Value, *_: Any) -> Any:
    if _dims(x) == e.type().dims:
        return x
    return e.op("Expand", x, e.shape(e.type().dims))


@row(A.copy.default)
def copy(e: Emitter, x: oir.Value, source: oir.Value, *_: Any) -> Any:
    same = e.cast(source, e.dtype())
    return same if _dims(source) == _dims(x) else e.op("Expand", same, e.shape(_dims(x)))


@row(A.repeat.default)
def repeat(e: Emitter, x: oir.Value, repeats: Sequence[Dim]) -> Any:
    missing = len(repeats) - len(_dims(x))
    if missing:
        x = e.reshape(x, _dims(x), (*[1] * missing, *_dims(x)))
    return e.op("Tile", x, e.shape(repeats))


@row(A.repeat_interleave.self_int)
def repeat_interleave(e: Emitter, x: oir.Value, repeats: int, dim: int | None, *_: Any) -> Any:
    have: tuple[Dim, ...] = _dims(x)
    if dim is None:
        x, have, dim = e.op("Reshape", x, e.const([-1], I64)), (reduce(mul, have, 1),), 0
    axis = _axis(dim, len(have))
    spread = e.op("Unsqueeze", x, e.const([axis + 1], I64))
    wide = (*have[: axis + 1], repeats, *have[axis + 1 :])
    ones = [1] * len(wide)
    ones[axis + 1] = repeats
    copied = e.op("Expand", spread, e.const(ones, I64))
    return e.reshape(copied, wide, e.type().dims)


# -- pieces


def piece(e: Emitter, x: oir.Value, axis: int, start: Dim, end: Dim, step: int = 1) -> Any:
    """x[..., start:end:step, ...] along an axis counted from the front."""
    steps = e.const([step], I64) if step != 1 else None
    return e.op("Slice", x, e.size(start), e.size(end), e.const([axis], I64), steps)


@row(A.slice.Tensor)
def slice_(
    e: Emitter, x: oir.Value, dim: int, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    axis = _axis(dim, len(_dims(x)))
    if start in (None, 0) and (end is None or end == _dims(x)[axis] or _is_far(end)) and step == 1:
        return x
    return piece(e, x, axis, start or 0, _FAR if end is None or _is_far(end) else end, step)


def _is_far(end: Any) -> bool:
    return isinstance(end, int) and end > _FAR


@row(A.narrow.default)
def narrow(e: Emitter, x: oir.Value, dim: int, start: Any, length: Dim) -> Any:
    return piece(e, x, _axis(dim, len(_dims(x))), start, length + start)


@row(A.select.int)
def select(e: Emitter, x: oir.Value, dim: int, index: Dim) -> Any:
    return e.op("Gather", x, e.scalar(index), axis=_axis(dim, len(_dims(x))))


@row(A.split.Tensor, A.split_with_sizes.default, A.chunk.default)
def split(e: Emitter, x: oir.Value, sizes: Any, dim: int = 0) -> Any:
    """Sizes are read off the result types, so all three are one row."""
    rank = len(_dims(x))
    axis = _axis(dim, rank)
    assert isinstance(e.result, tuple)
    parts = [part.dims[axis] for part in e.result]
    if len(parts) == 1:
        return (e.op("Identity", x),)
    return e.op("Split", x, e.shape(parts), axis=axis, outputs=len(parts))


@row(A.unbind.int)
def unbind(e: Emitter, x: oir.Value, dim: int = 0) -> Any:
    axis = _axis(dim, len(_dims(x)))
    assert isinstance(e.result, tuple)
    return tuple(e.op("Gather", x, e.const(i, I64), axis=axis) for i in range(len(e.result)))


@row(A.flip.default)
def flip(e: Emitter, x: oir.Value, dims: Sequence[int]) -> Any:
    count = len(dims)
    starts, ends = e.const([-1] * count, I64), e.const([-_FAR] * count, I64)
    return e.op("Slice", x, starts, ends, _axes(e, dims, len(_dims(x))), e.const([-1] * count, I64))


# -- putting together


@row(A.cat.default, A.concat.default)
def cat(e: Emitter, tensors: Sequence[oir.Value], dim: int = 0) -> Any:
    rank = len(e.type().dims)
    parts = [e.cast(t, e.dtype()) for t in tensors if len(_dims(t)) == rank]
    return parts[0] if len(parts) == 1 else e.op("Concat", *parts, axis=_axis(dim, rank))


@row(A.stack.default)
def stack(e: Emitter, tensors: Sequence[oir.Value], dim: int = 0) -> Any:
    rank = len(e.type().dims)
    axis = _axis(dim, rank)
    parts = [e.op("Unsqueeze", e.cast(t, e.dtype()), e.const([axis], I64)) for t in tensors]
    return e.op("Concat", *parts, axis=axis)


@row(A.constant_pad_nd.default)
def pad(e: Emitter, x: oir.Value, pads: Sequence[int], value: Any = 0) -> Any:
    """torch lists (before, after) from the last axis on; negative pads cut off."""
    rank = len(_dims(x))
    before, after = [0] * rank, [0] * rank
    for i in range(len(pads) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    return e.op("Pad", x, e.const(before + after, I64), operand(e, value, e.dtype()))


# -- lookups


@row(A.embedding.default)
def embedding(e: Emitter, table: oir.Value, indices: oir.Value, *_: Any) -> Any:
    return e.op("Gather", table, indices, axis=0)


@row(A.index_select.default)
def index_select(e: Emitter, x: oir.Value, dim: int, index: oir.Value) -> Any:
    return e.op("Gather", x, index, axis=_axis(dim, len(_dims(x))))


@row(A.gather.default)
def gather(e: Emitter, x: oir.Value, dim: int, index: oir.Value, *_: Any) -> Any:
    return e.op("GatherElements", x, index, axis=_axis(dim, len(_dims(x))))


@row(A.scatter.src)
def scatter(e: Emitter, x: oir.Value, dim: int, index: oir.Value, src: oir.Value) -> Any:
    return e.op("ScatterElements", x, index, e.cast(src, e.dtype()), axis=_axis(dim, len(_dims(x))))


@row(A.scatter.value)
def scatter_value(e: Emitter, x: oir.Value, dim: int, index: oir.Value, value: Any) -> Any:
    fill = e.op("Expand", operand(e, value, e.dtype()), e.op("Shape", index))
    return e.op("ScatterElements", x, index, fill, axis=_axis(dim, len(_dims(x))))


@row(A.index_add.default)
def index_add(
    e: Emitter, x: oir.Value, dim: int, index: oir.Value, source: oir.Value, alpha: Any = 1
) -> Any:
    axis = _axis(dim, len(_dims(x)))
    spread = [1] * len(_dims(x))
    spread[axis] = -1
    rows = e.op("Expand", e.op("Reshape", index, e.const(spread, I64)), e.op("Shape", source))
    added = source if alpha == 1 else e.op("Mul", source, operand(e, alpha, e.dtype()))
    return e.op("ScatterElements", x, rows, added, axis=axis, reduction="add")


def _leading_indices(node: torch.fx.Node) -> bool:
    """Whether an index list is one index anywhere, or several on the first axes."""
    indices: Any = node.args[1]
    given = [i for i, index in enumerate(indices) if index is not None]
    kinds = {indices[i].meta["type"].dtype for i in given}
    if kinds - {torch.int64, torch.int32}:
        return False
    return len(given) == 1 or given == list(range(len(given)))


@row(A.index.Tensor, when=_leading_indices)
def index(e: Emitter, x: oir.Value, indices: Sequence[oir.Value | None]) -> Any:
    given = [(axis, value) for axis, value in enumerate(indices) if value is not None]
    if len(given) == 1:
        axis, value = given[0]
        return e.op("Gather", x, value, axis=axis)
    rest = len(_dims(x)) - len(given)
    joint = e.type().dims[: len(e.type().dims) - rest]
    shape = e.shape(joint)
    columns = []
    for _, value in given:
        whole = e.op("Expand", e.cast(value, I64), shape)
        columns.append(e.op("Unsqueeze", whole, e.const([-1], I64)))
    return e.op("GatherND", x, e.op("Concat", *columns, axis=-1))


def _one_leading_index(node: Any) -> bool:
    return len(node.args[1]) == 1 and _leading_indices(node)


@row(A.index_put.default, when=_one_leading_index)
def index_put(
    e: Emitter, x: oir.Value, indices: Any, values: oir.Value, accumulate: bool = False
) -> Any:
    columns = e.op("Unsqueeze", e.cast(indices[0], I64), e.const([-1], I64))
    dims = (*type_of(indices[0]).dims, *_dims(x)[1:])
    spread = e.op("Expand", e.cast(values, e.dtype()), e.shape(dims))
    return e.op("ScatterND", x, columns, spread, reduction="add" if accumulate else "none")


# -- made from nothing


@row(A.full.default, A.full_like.default)
def full(e: Emitter, like: Any, value: Any, *_: Any) -> Any:
    constant, dims = operand(e, value, e.dtype()), e.type().dims
    return e.op("Expand", constant, e.shape(dims)) if dims else constant


@row(A.new_full.default)
def new_full(e: Emitter, x: Any, size: Any, value: Any, *_: Any) -> Any:
    return full(e, size, value)


@row(
    A.zeros.default,
    A.zeros_like.default,
    A.new_zeros.default,
    A.empty.memory_format,
    A.empty_like.default,
    A.new_empty.default,
)
def zeros(e: Emitter, like: Any, *_: Any) -> Any:
    return full(e, like, 0)


@row(A.ones.default, A.ones_like.default, A.new_ones.default)
def ones(e: Emitter, like: Any, *_: Any) -> Any:
    return full(e, like, 1)


@row(A.scalar_tensor.default)
def scalar_tensor(e: Emitter, value: Any, *_: Any) -> Any:
    return operand(e, value, e.dtype())


@row(A.arange.start_step)
def arange(e: Emitter, start: Any, end: Any, step: Any = 1, *_: Any) -> Any:
    dtype = e.dtype() if e.dtype() in (torch.float32, I64, torch.int32) else I64
    parts = [operand(e, x, dtype) for x in (start, end, step)]
    return e.cast(e.op("Range", *parts), e.dtype(), dtype)


row(A.arange.default)(lambda e, end, *_: arange(e, 0, end))
row(A.arange.start)(lambda e, start, end, *_: arange(e, start, end))


def _triangle(upper: int, e: Emitter, x: oir.Value, diagonal: int = 0) -> Any:
    wide = x if e.dtype() != torch.bool else e.op("Cast", x, to=int(oir.DataType.INT64))
    cut = e.op("Trilu", wide, e.const(diagonal, I64), upper=upper)
    return cut if wide is x else e.op("Cast", cut, to=int(oir.DataType.BOOL))


row(A.tril.default)(partial(_triangle, 0))
row(A.triu.default)(partial(_triangle, 1))
