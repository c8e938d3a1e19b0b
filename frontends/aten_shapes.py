"""Lowerings of ops that move, select or make elements: reshape, permute, slice, cat, full."""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any

import torch.fx

from ..ir import Dim
from .aten import A, Call, lowers


@lowers(
    A.alias.default,
    A.clone.default,
    A.contiguous.default,
    A.detach.default,
    A.lift_fresh_copy.default,
    A.lift_fresh.default,
    A.positive.default,
    A.resolve_conj.default,
    A.resolve_neg.default,
    A.dropout.default,
    A.feature_dropout.default,
    A.native_dropout.default,
)
def identity(c: Call) -> Any:
    """Values have no storage, so copies and aliases of them are the values themselves; and models
    are traced for inference, where there is no dropout."""
    return c.args[0]


@lowers(
    A.to.dtype,
    A.to.dtype_layout,
    A.to.device,
    A.to.other,
    A.type_as.default,
    A._to_copy.default,
)
def cast(c: Call) -> Any:
    """Devices are the backend's affair; what remains of a move is the dtype."""
    return c.b.cast(c.args[0], c.dtype)


@lowers(
    A.view.default,
    A._unsafe_view.default,
    A.reshape.default,
    A.flatten.using_ints,
    A.unflatten.int,
    A.squeeze.default,
    A.squeeze.dim,
    A.squeeze.dims,
    A.view_as.default,
    A.reshape_as.default,
)
def reshape(c: Call) -> Any:
    """All ways to say the same elements in other dims, with every size spelled out."""
    return c.b.reshape(c.args[0], c.shape)


@lowers(A.permute.default)
def permute(c: Call) -> Any:
    return c.b.permute(c.args[0], list(c.args[1]))


@lowers(A.transpose.int, A.swapaxes.default, A.swapdims.default)
def transpose(c: Call) -> Any:
    order = list(range(c.fake.dim()))
    first, second = c.args[1], c.args[2]
    order[first], order[second] = order[second], order[first]
    return c.b.permute(c.args[0], order)


@lowers(A.t.default, A.numpy_T.default, A.mT.default)
def reverse_axes(c: Call) -> Any:
    """Swaps the last two axes (of a matrix: all there are)."""
    order = list(range(c.fake.dim()))
    order[-2:] = order[-2:][::-1]
    return c.b.permute(c.args[0], order)


@lowers(A.slice.Tensor)
def slice_(c: Call) -> Any:
    source, axis = c.args[0], c.arg(1, "dim", 0) % c.fake.dim()
    start, stop, step = c.arg(2, "start", 0) or 0, c.arg(3, "end"), c.arg(4, "step", 1)
    size = c.b.shape(source)[axis]
    if c.shape[axis] == size and step == 1:
        return source  # however its bounds are written
    if step != 1:
        stop = size if stop is None or _past_end(stop, size) else stop
        return c.b.call(A.slice.Tensor, source, axis, start, stop, step)
    if isinstance(start, int) and start < 0:
        start = size + start if isinstance(size, int) else size - (-start)
    length = c.shape[axis]
    return c.b.slice(source, axis, start, start + length)


def _past_end(stop: Dim, size: Dim) -> bool:
    return isinstance(stop, int) and (stop >= 2**31 or (isinstance(size, int) and stop > size))


@lowers(A.narrow.default)
def narrow(c: Call) -> Any:
    source, axis, start, length = c.args
    return c.b.slice(source, axis % c.fake.dim(), start, start + length)


@lowers(
    A.split.Tensor,
    A.split.sizes,
    A.split_with_sizes.default,
    A.split_with_sizes_copy.default,
    A.chunk.default,
    A.tensor_split.sections,
)
def split(c: Call) -> Any:
    """Each part is a slice of its own, so that unused parts vanish."""
    source = c.args[0]
    axis = c.arg(2, "dim", 0) % c.rank(0)
    start: Dim = 0
    parts = []
    for fake in c.fake:
        length = c.sizes.dim(fake.shape[axis])
        parts.append(c.b.slice(source, axis, start, start + length))
        start = start + length
    return parts


@lowers(A.unbind.int)
def unbind(c: Call) -> Any:
    axis = c.arg(1, "dim", 0)
    return [c.b.call(A.select.int, c.args[0], axis, index) for index in range(len(c.fake))]


@lowers(A.cat.default, A.concat.default, A.concatenate.default)
def cat(c: Call) -> Any:
    axis = c.arg(1, "dim", 0) % c.fake.dim()
    return c.b.call(A.cat.default, list(c.args[0]), axis)


@lowers(A.stack.default)
def stack(c: Call) -> Any:
    return c.b.stack(list(c.args[0]), c.arg(1, "dim", 0) % c.fake.dim())


@lowers(A.expand.default, A.expand_as.default, A.broadcast_to.default)
def expand(c: Call) -> Any:
    source, shape = c.args[0], c.shape
    leading: list[Dim] = [1] * (len(shape) - c.rank(0))
    if leading:
        source = c.b.reshape(source, leading + c.b.shape(source))
    return c.b.expand(source, shape)


@lowers(A.repeat_interleave.self_int)
def repeat_interleave(c: Call) -> Any:
    """Each element repeated in place; how key heads are given to their group of query heads."""
    source, repeats, axis = c.args[0], c.args[1], c.arg(2, "dim")
    if axis is None:
        source, axis = c.b.reshape(source, [reduce(mul, c.b.shape(source), 1)]), 0
    axis %= c.rank(0)
    wide = c.b.call(A.unsqueeze.default, source, axis + 1)
    shape = c.b.shape(wide)
    shape[axis + 1] = repeats
    return c.b.reshape(c.b.expand(wide, shape), c.shape)


@lowers(A.repeat.default)
def repeat(c: Call) -> Any:
    """Repeating axes of size 1 is expanding them."""
    source, repeats = c.args[0], list(c.args[1])
    shape = [1] * (len(repeats) - c.rank(0)) + c.b.shape(source)
    source = c.b.reshape(source, shape)
    if all(size == 1 or times == 1 for size, times in zip(shape, repeats, strict=True)):
        return c.b.expand(source, c.shape)
    return c.b.call(A.repeat.default, source, repeats)


@lowers(A.slice_scatter.default)
def slice_scatter(c: Call) -> Any:
    """A slice replaced: what comes before, the new part, what comes after."""
    base, part, axis = c.args[0], c.args[1], c.arg(2, "dim", 0) % c.fake.dim()
    size, start = c.b.shape(base)[axis], c.arg(3, "start", 0) or 0
    stop = start + c.b.shape(part)[axis]
    pieces = []
    if start != 0:
        pieces += _pieces(c, base, axis, 0, start)
    pieces.append(part)
    if stop != size:
        pieces += _pieces(c, base, axis, stop, size)
    return pieces[0] if len(pieces) == 1 else c.b.call(A.cat.default, pieces, axis)


def _pieces(c: Call, base: torch.fx.Node, axis: int, start: Dim, stop: Dim) -> list[Any]:
    """A slice of a value; of a concatenation, the parts themselves where they fit exactly."""
    if base.target is A.cat.default and base.args[1] == axis:
        offset: Dim = 0
        inside, bounds = list[Any](), [offset]
        parts: Any = base.args[0]
        for part in parts:
            length = c.b.shape(part)[axis]
            if offset == start or inside:
                inside.append(part)
            offset = offset + length
            bounds.append(offset)
            if offset == stop and inside:
                return inside
    return [c.b.slice(base, axis, start, stop)]


@lowers(A.copy.default)
def copy(c: Call) -> Any:
    """The second value, in the dims and dtype of the first."""
    return c.b.expand(c.b.cast(c.args[1], c.dtype), c.shape)


@lowers(A.index_select.default)
def index_select(c: Call) -> Any:
    source, axis, index = c.args
    if axis == 0 and c.rank(0) == 2:
        return c.b.call(A.embedding.default, source, index)
    return c.b.call(A.index.Tensor, source, [None] * (axis % c.rank(0)) + [index])


@lowers(A.index.Tensor)
def index(c: Call) -> Any:
    """Indexing with a short constant range is a slice; rows of a matrix are an embedding."""
    given = [(axis, node) for axis, node in enumerate(c.args[1]) if node is not None]
    if len(given) == 1:
        axis, rows = given[0][0], _constant_range(c, given[0][1], given[0][0])
        if rows is not None:
            return c.b.slice(c.args[0], axis, rows.start, rows.stop)
        if axis == 0 and c.rank(0) == 2 and not _may_be_negative(given[0][1]):
            return c.b.call(A.embedding.default, c.args[0], given[0][1])
    return c.b.call(A.index.Tensor, c.args[0], list(c.args[1]))


def _may_be_negative(index: torch.fx.Node) -> bool:
    """Whether an index may count from the end (or is a mask); positions do not."""
    return index.target != "positions"


def _constant_range(c: Call, index: torch.fx.Node, axis: int) -> range | None:
    """The consecutive numbers that an index holds, if it is a small constant."""
    size, dims = c.b.shape(c.args[0])[axis], c.b.shape(index)
    short = len(dims) == 1 and isinstance(dims[0], int) and 0 < dims[0] <= _SHORT
    if index.op != "get_attr" or not short or not isinstance(size, int):
        return None
    values = c.b.weights[str(index.target)].load()
    if values.dtype == torch.bool:
        return None
    first = int(values[0]) % size
    rows = range(first, first + len(values))
    return rows if [int(value) % size for value in values] == list(rows) else None


_SHORT = 64


@lowers(A.embedding.default)
def embedding(c: Call) -> Any:
    """Padding rows matter in training only."""
    return c.b.call(A.embedding.default, c.args[0], c.args[1])


@lowers(A.arange.default, A.arange.start, A.arange.start_step)
def arange(c: Call) -> Any:
    start, stop, step = (0, c.args[0], 1) if len(c.args) == 1 else (*c.args, 1)[:3]
    return c.b.call(A.arange.start_step, start, stop, step, dtype=c.dtype)


@lowers(
    A.full.default,
    A.full_like.default,
    A.new_full.default,
    A.scalar_tensor.default,
)
def full(c: Call) -> Any:
    return _filled(c, c.args[-1])


def _filled(c: Call, value: Any) -> Any:
    return c.b.call(A.full.default, c.shape, value, dtype=c.dtype)


@lowers(
    A.zeros.default,
    A.zeros_like.default,
    A.new_zeros.default,
    A.empty.memory_format,
    A.empty_like.default,
    A.new_empty.default,
)
def zeros(c: Call) -> Any:
    """Uninitialised memory reads as zeros."""
    return _filled(c, 0)


@lowers(A.ones.default, A.ones_like.default, A.new_ones.default)
def ones(c: Call) -> Any:
    return _filled(c, 1)
