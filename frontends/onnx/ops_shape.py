"""ONNX ops that move and make values, and those on shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ...ir import UnsupportedError
from .table import Context, op
from .values import (
    AllTokens,
    AsTheyStand,
    EmptyPast,
    Numbers,
    Parameter,
    Value,
    dims,
    numbers,
    tensor,
)

ENDS = 2**31 - 1
"""From here on a bound means the end."""

MOST = 2**12
"""Numbers that are worked out one by one, where a value is known before the trace."""


@op("Identity")
def identity(c: Context, x: Value) -> Value:
    return x


@op("Dropout")
def dropout(c: Context, x: Value, *_: Value) -> Value:
    return x


@op("Constant")
def constant(c: Context) -> Value:
    for name in ("value_int", "value_float"):
        if (found := c.attribute(name)) is not None:
            return Numbers((found,), True)
    for name in ("value_ints", "value_floats"):
        if (found := c.attribute(name)) is not None:
            return Numbers(tuple(found))
    return known(c.attribute("value").numpy())


def known(array: Any) -> Value:
    """A constant: as numbers if it is small and has at most one axis, or has but one value."""
    if array.size == 1 and array.ndim <= 1:
        item = array.reshape(-1)[0].item()
        single = array.dtype == np.float32
        return Numbers((written(item) if single else item,), array.ndim == 0)
    if array.ndim == 1 and array.size <= 16 and array.dtype.kind in "iub":
        return Numbers(tuple(array.tolist()))
    return torch.from_numpy(array.copy())


def written(value: float) -> float:
    """The shortest decimal that a float32 stands for: 1e-6, not 9.999999974752427e-07."""
    short = float(str(np.float32(value)))
    return short if abs(short) <= float(np.finfo(np.float32).max) else value  # a mask's -3.4e38


@op("Shape")
def shape(c: Context, x: Value) -> Value:
    sizes = list(dims(x))
    start, end = c.attribute("start", 0), c.attribute("end", len(sizes))
    return Numbers(tuple(sizes[slice(start, end)]))


@op("Size")
def size(c: Context, x: Value) -> Value:
    return Numbers((math.prod(dims(x)),), True)


@op("Reshape")
def reshape(c: Context, x: Value, to: Value) -> Value:
    target = numbers(to)
    if isinstance(x, Numbers):
        return Numbers(x.items, not target)
    have = dims(x)
    if not c.attribute("allowzero", 0):
        target = [have[i] if _is(n, 0) else n for i, n in enumerate(target)]
    return tensor(x).reshape(target)


def _is(size: Any, value: int) -> bool:
    """Whether a size is certainly this; those of the trace are not 0 or -1."""
    return isinstance(size, int) and size == value


@op("Squeeze")
def squeeze(c: Context, x: Value, axes: Value = None) -> Value:
    if isinstance(x, Numbers):
        return Numbers(x.items, True)
    given = c.attribute("axes") if axes is None else numbers(axes)
    y = tensor(x)
    if given is None:
        return y.squeeze()
    for axis in sorted((axis % y.dim() for axis in given), reverse=True):
        y = y.squeeze(axis)
    return y


@op("Unsqueeze")
def unsqueeze(c: Context, x: Value, axes: Value = None) -> Value:
    given = c.attribute("axes") if axes is None else numbers(axes)
    if isinstance(x, Numbers) and x.scalar and len(given) == 1:
        return Numbers(x.items)
    if isinstance(x, AsTheyStand):  # an index of rows, as `gather_nd` takes it
        return x
    y = tensor(x)
    rank = y.dim() + len(given)
    for axis in sorted(axis % rank for axis in given):
        y = y.unsqueeze(axis)
    return y


@op("Flatten")
def flatten(c: Context, x: Value) -> Value:
    y, axis = tensor(x), c.attribute("axis", 1)
    return y.reshape(math.prod(y.shape[:axis]), math.prod(y.shape[axis:]))


@op("Transpose")
def transpose(c: Context, x: Value) -> Value:
    if isinstance(x, Parameter) and x.tensor.dim() == 2:
        return Parameter(x.name, x.tensor, not x.turned)
    y = tensor(x)
    return y.permute(c.attribute("perm", tuple(reversed(range(y.dim())))))


@op("Concat")
def concat(c: Context, *parts: Value) -> Value:
    there = [part for part in parts if not isinstance(part, EmptyPast)]
    if len(there) <= 1:
        return (there or parts)[0]
    if all(isinstance(part, Numbers) for part in there):
        items = [item for part in there for item in numbers(part)]
        if len(items) > MOST:
            raise UnsupportedError(f"a shape, or another argument, of {len(items)} numbers")
        return Numbers(tuple(items))
    return torch.cat([tensor(part) for part in there], c.attribute("axis"))


@op("Split")
def split(c: Context, x: Value, sizes: Value = None) -> Any:
    y, axis = tensor(x), c.attribute("axis", 0)
    if sizes is not None:
        return y.split(numbers(sizes), axis)
    count = c.attribute("num_outputs", len(c.node.outputs))
    return y.split(-(-y.shape[axis] // count), axis)


@op("Slice")
def slice_(
    c: Context, x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None
) -> Value:
    first, last = numbers(starts), numbers(ends)
    along = list(range(len(first))) if axes is None else numbers(axes)
    by = [1] * len(first) if steps is None else numbers(steps)
    if isinstance(x, Numbers):
        return Numbers(tuple(x.items[first[0] : last[0] : by[0]]))
    if isinstance(x, AllTokens) and (first, along, by) == ([0], [1], [1]) and last == [x.tokens]:
        return x
    y = tensor(x)
    for start, end, axis, step in zip(first, last, along, by, strict=True):
        stop = None if isinstance(end, int) and end >= ENDS else end
        y = y[(slice(None),) * (axis % y.dim()) + (slice(start, stop, step),)]
    return y


@op("Gather")
def gather(c: Context, x: Value, index: Value) -> Value:
    axis = c.attribute("axis", 0)
    if isinstance(x, Numbers):
        picked = tuple(x.items[int(i)] for i in numbers(index))
        return Numbers(picked, isinstance(index, Numbers) and index.scalar)
    if isinstance(index, Numbers) and index.scalar:
        return tensor(x).select(axis, index.one)
    if axis == 0 and tensor(x).dim() == 2:
        return torch.nn.functional.embedding(tensor(index).long(), tensor(x))
    where = tensor(index).long()
    y = tensor(x)
    picked_ = y.index_select(axis, where.reshape(-1))
    return picked_.reshape((*y.shape[:axis], *where.shape, *y.shape[axis % y.dim() + 1 :]))


@op("GatherElements")
def gather_elements(c: Context, x: Value, index: Value) -> Value:
    if isinstance(index, AsTheyStand) and c.attribute("axis", 0) == 1:
        return x
    return tensor(x).gather(c.attribute("axis", 0), tensor(index).long())


@op("GatherND")
def gather_nd(c: Context, x: Value, index: Value) -> Value:
    if isinstance(index, AsTheyStand) and c.attribute("batch_dims", 0) == 1:
        return x
    if c.attribute("batch_dims", 0):
        raise UnsupportedError("GatherND of batches")
    places = tensor(index).long()
    return tensor(x)[places.unbind(-1)]


@op("Expand")
def expand(c: Context, x: Value, to: Value) -> Value:
    y, target = tensor(x), numbers(to)
    # Sizes of the target may be 1 where the value's are not.
    have = [1] * (len(target) - y.dim()) + list(y.shape)
    wanted = [h if _is(t, 1) else t for h, t in zip(have, target, strict=False)]
    return y.expand(wanted)


@op("Tile")
def tile(c: Context, x: Value, times: Value) -> Value:
    return tensor(x).repeat(numbers(times))


@op("ConstantOfShape")
def constant_of_shape(c: Context, to: Value) -> Value:
    given, sizes = c.attribute("value"), numbers(to)
    if given is None:
        return torch.full(sizes, 0.0)
    array = given.numpy()
    few = all(isinstance(n, int) and n <= MOST for n in sizes)
    if array.dtype.kind in "iub" and len(sizes) <= 1 and few:
        return known(np.full(sizes, array.item()))
    return torch.full(sizes, array.item(), dtype=torch.from_numpy(array.copy()).dtype)


@op("Range")
def range_(c: Context, start: Value, end: Value, step: Value) -> Value:
    bounds = [numbers(bound)[0] for bound in (start, end, step)]
    return torch.arange(*bounds)


@op("Cast")
def cast(c: Context, x: Value) -> Value:
    dtype = c.float(c.attribute("to"))
    if isinstance(x, AllTokens):
        return x
    if isinstance(x, Numbers):
        kind = {torch.bool: bool}.get(dtype, float if dtype.is_floating_point else None)
        return x if kind is None else Numbers(tuple(kind(i) for i in x.items), x.scalar)
    return tensor(x).to(dtype)


@op("CastLike")
def cast_like(c: Context, x: Value, like: Value) -> Value:
    return x if isinstance(like, Numbers) else tensor(x).to(tensor(like).dtype)


@op("Trilu")
def trilu(c: Context, x: Value, diagonal: Value = None) -> Value:
    by = 0 if diagonal is None else numbers(diagonal)[0]
    y = tensor(x)
    return y.triu(by) if c.attribute("upper", 1) else y.tril(by)


@op("ScatterElements")
def scatter_elements(c: Context, x: Value, index: Value, updates: Value) -> Value:
    if c.attribute("reduction", "none") != "none":
        raise UnsupportedError("ScatterElements that reduces")
    return tensor(x).scatter(c.attribute("axis", 0), tensor(index).long(), tensor(updates))
