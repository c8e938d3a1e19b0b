"""Rows of reductions, sorting and cumulation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import onnx_ir as oir
import torch

from .emit import Emitter, row, type_of
from .rows_elementwise import operand

A = torch.ops.aten
I64 = torch.int64


def _rank(x: oir.Value) -> int:
    return len(type_of(x).dims)


def reduce(e: Emitter, op_type: str, x: oir.Value, dim: Any, keepdim: bool) -> Any:
    """A Reduce* node over torch's dims; None and an empty list mean all of them."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    axes = e.const(dims, I64) if dims else None
    return e.op(op_type, x, axes, keepdims=int(keepdim))


def _added(op_type: str, e: Emitter, x: oir.Value, dim: Any, keepdim: bool = False, *_: Any) -> Any:
    return reduce(e, op_type, e.cast(x, e.dtype()), dim, keepdim)


def _all_added(op_type: str, e: Emitter, x: oir.Value, *_: Any) -> Any:
    return _added(op_type, e, x, None)


row(A.sum.dim_IntList)(partial(_added, "ReduceSum"))
row(A.mean.dim)(partial(_added, "ReduceMean"))
row(A.sum.default)(partial(_all_added, "ReduceSum"))
row(A.mean.default)(partial(_all_added, "ReduceMean"))


def _extreme(op_type: str, e: Emitter, x: oir.Value, dim: Any = None, keep: bool = False) -> Any:
    return reduce(e, op_type, x, dim, keep)


row(A.amax.default, A.max.default)(partial(_extreme, "ReduceMax"))
row(A.amin.default, A.min.default)(partial(_extreme, "ReduceMin"))


def _with_indices(sign: str, e: Emitter, x: oir.Value, dim: int, keepdim: bool = False) -> Any:
    return (
        reduce(e, f"Reduce{sign}", x, dim, keepdim),
        e.op(f"Arg{sign}", x, axis=dim % _rank(x), keepdims=int(keepdim)),
    )


row(A.max.dim)(partial(_with_indices, "Max"))
row(A.min.dim)(partial(_with_indices, "Min"))


def _arg(op_type: str, e: Emitter, x: oir.Value, dim: int | None, keepdim: bool = False) -> Any:
    if dim is not None:
        return e.op(op_type, x, axis=dim % _rank(x), keepdims=int(keepdim))
    flat = e.op("Reshape", x, e.const([-1], I64))
    return e.op(op_type, flat, axis=0, keepdims=0)


row(A.argmax.default)(partial(_arg, "ArgMax"))
row(A.argmin.default)(partial(_arg, "ArgMin"))


def _logical(op_type: str, e: Emitter, x: oir.Value, dim: Any = None, keepdim: bool = False) -> Any:
    ones = e.cast(e.cast(x, torch.bool), torch.int32, torch.bool)
    return e.op("Cast", reduce(e, op_type, ones, dim, keepdim), to=int(oir.DataType.BOOL))


row(A.any.dim, A.any.dims, A.any.default)(partial(_logical, "ReduceMax"))
row(A.all.dim, A.all.dims, A.all.default)(partial(_logical, "ReduceMin"))


@row(A.var.correction)
def var(
    e: Emitter, x: oir.Value, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> Any:
    dtype, dims = e.dtype(), type_of(x).dims
    axes = range(len(dims)) if dim is None else [dim] if isinstance(dim, int) else dim
    centred = e.op("Sub", x, reduce(e, "ReduceMean", x, dim, True))
    total = reduce(e, "ReduceSum", e.op("Mul", centred, centred), dim, keepdim)
    count = e.const(1, dtype)
    for axis in axes:
        count = e.op("Mul", count, operand(e, dims[axis], dtype))
    freedom = 1 if correction is None else correction
    return e.op("Div", total, e.op("Sub", count, e.const(freedom, dtype)))


def _softmax(op_type: str, e: Emitter, x: oir.Value, dim: int, *_: Any) -> Any:
    return e.op(op_type, operand(e, x, e.dtype()), axis=dim)


row(A.softmax.int, A._softmax.default)(partial(_softmax, "Softmax"))
row(A.log_softmax.int, A._log_softmax.default)(partial(_softmax, "LogSoftmax"))


@row(A.logsumexp.default)
def logsumexp(e: Emitter, x: oir.Value, dim: Sequence[int], keepdim: bool = False) -> Any:
    return reduce(e, "ReduceLogSumExp", x, dim, keepdim)


@row(A.cumsum.default)
def cumsum(e: Emitter, x: oir.Value, dim: int, *_: Any) -> Any:
    return e.op("CumSum", e.cast(x, e.dtype()), e.const(dim % max(_rank(x), 1), I64))


@row(A.topk.default)
def topk(
    e: Emitter, x: oir.Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    return e.op("TopK", x, e.size(k), axis=dim, largest=int(largest), sorted=int(sorted), outputs=2)


@row(A.sort.default, A.sort.stable)
def sort(e: Emitter, x: oir.Value, *options: Any) -> Any:
    """`sort` takes (dim, descending), `sort.stable` (stable, dim, descending)."""
    dim, descending = options[-2:]
    axis = dim % _rank(x)
    size = e.op("Shape", x, start=axis, end=axis + 1)
    return e.op("TopK", x, size, axis=axis, largest=int(descending), sorted=1, outputs=2)
