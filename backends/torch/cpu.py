"""What inductor runs steps with on the CPU: native kernels.

A step of decoding has few rows and reads every weight once. Library products are made for many
rows: in float32 two rows can take three times as long as one. The kernels read weights at the speed
of memory. Of many rows, such as a prompt's, the library that torch comes with multiplies fast on
its maker's processors, and on another at a quarter of ONNX Runtime's speed; what the kernels need
is wide vectors, whoever made them.

They take sums over a row, in norms and attention, too, in one order whatever rows share the step:
a token's results have the same bits alone and among drafted ones. Before a product of bytes a last
bit matters, because rounding to whole numbers makes a step of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ir.ops import all_ops
from ..own_kernels import absent_is_zero, floats, own_ops
from . import native, native_quantized
from .native import OPS
from .rows import Row
from .rows import attend as library_attend

A = torch.ops.aten

MOST_BEST = 64
"""Largest values that are kept in order one by one; for more of them there are better ways."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, alike: bool = False) -> Tensor:
    """`torch.nn.functional.linear`; native in float32. alike: see `native.linear_float32`."""
    plain = len(weight.shape) == 2 and _per_column(weight.shape[:1], bias)
    if not plain or not _float32(x, weight, bias):
        return F.linear(x, weight, bias)
    result: Tensor = native.linear_float32(x, weight, alike)
    return result if bias is None else result + bias


def native_row(
    name: str,
    when: Callable[[dict[str, Any]], bool] = lambda given: True,
    otherwise: Row | None = None,
) -> Row:
    """What runs graftwork's op of this name: a native kernel where operands are in float32.

    when: what else must be, by argument. otherwise: what runs where it is not; None is the op's
    meaning. Errors: `InputError` as the op.
    """
    op, native = all_ops()[name], OPS[name]
    other, declared = otherwise or op.meaning, op.declared
    cast = () if op.native is None else op.native.cast.split()
    taken, zeroed = [x for x in floats(op) if x not in cast], absent_is_zero(op)

    def row(*arguments: Any, **options: Any) -> Any:
        declared.check(*arguments, **options)
        given = dict(zip(declared.names, declared.bound(*arguments, **options), strict=True))
        plain = _float32(*[given[operand] for operand in taken])
        if not (plain and all(given[option] != 0 for option in zeroed) and when(given)):
            return other(*arguments, **options)
        for operand in cast:
            given[operand] = None if given[operand] is None else given[operand].float()
        return native(*given.values())

    return row


def _whole(given: dict[str, Any]) -> bool:
    """Whether a norm has a weight for every column, and not one for all."""
    return bool(given["weight"].shape == given["x"].shape[-1:])


rms_norm = native_row("rms_norm", when=_whole)
add_rms_norm = native_row("add_rms_norm", when=_whole)
layer_norm = native_row("layer_norm")

LIBRARY = {"attend": library_attend}
"""What runs ops that have a kernel where the kernel does not, unless it is their meaning."""

OWN = {op.name: native_row(op.name, otherwise=LIBRARY.get(op.name)) for op in own_ops()}
"""The rows of the ops that have a kernel."""


def topk(
    x: Tensor, count: int, axis: int = -1, largest: bool = True, in_order: bool = True
) -> tuple[Tensor, Tensor]:
    """`aten.topk`; native for a few of the largest of float32 rows."""
    found: tuple[Tensor, Tensor]
    last = x.dim() > 0 and axis in (-1, x.dim() - 1)
    if last and largest and 1 <= count <= MOST_BEST and x.dtype == torch.float32:
        found = native.topk(x, count)
    else:
        found = A.topk.default(x, count, axis, largest, in_order)
    return found


def embedding(weight: Tensor, index: Tensor, *options: Any) -> Tensor:
    """`aten.embedding`, its indices checked."""
    return F.embedding(_inside(index, weight.shape[0], signed=False), weight)


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """`aten.index`, its indices checked, which may count from the end."""
    found: Tensor = A.index.Tensor(x, _all_inside(x, indices))
    return found


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`aten.index_put`, its indices checked as those of `index`."""
    found: Tensor = A.index_put.default(x, _all_inside(x, indices), values, accumulate)
    return found


def _all_inside(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if part is None else _inside(part, x.shape[axis], signed=True)
        for axis, part in enumerate(indices)
    ]


def along_axis(op: Any) -> Row:
    """An op of a tensor, an axis and indices into it, which are checked, and more."""

    def checked(x: Tensor, axis: int, index: Tensor, *more: Any, **options: Any) -> Any:
        size = x.shape[axis] if x.dim() else 1
        return op(x, axis, _inside(index, size, signed=False), *more, **options)

    return checked


def _inside(index: Tensor, size: int, *, signed: bool) -> Tensor:
    if index.dtype not in (torch.int32, torch.int64):  # masks are no indices
        return index
    checked: Tensor = native.indices(index.long(), -size if signed else 0, size - 1)
    return checked


def _float32(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.dtype == torch.float32 for tensor in tensors)


def _per_column(shape: tuple[int, ...], *tensors: Tensor | None) -> bool:
    """Whether tensors hold one number a column, as kernels want them; meanings broadcast others."""
    return len(shape) == 1 and all(tensor is None or tensor.shape == shape for tensor in tensors)


CPU_ROWS: dict[Any, Row] = {
    A.embedding.default: embedding,
    A.index.Tensor: index,
    A.index_put.default: index_put,
    A.linear.default: linear,
    A.topk.default: topk,
    **{
        op: along_axis(op)
        for op in (
            A.gather.default,
            A.index_select.default,
            A.scatter.src,
            A.scatter.value,
            A.scatter_add.default,
            A.scatter_reduce.two,
        )
    },
    native_quantized.LINEAR: native_quantized.quantized_linear,
    native_quantized.EMBEDDING: native_quantized.quantized_embedding,
    **{op.overload: OWN[op.name] for op in own_ops()},
    torch.ops.graftwork.rms_norm.default: rms_norm,
    torch.ops.graftwork.add_rms_norm.default: add_rms_norm,
    torch.ops.graftwork.layer_norm.default: layer_norm,
}
"""The rows that inductor has for the CPU only."""


def linear_alike(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, where a row has the same bits in steps of every width."""
    return linear(x, weight, bias, alike=True)


def softmax_alike(x: Tensor, axis: int, to_float: bool) -> Tensor:
    """`aten._softmax`, where a row has the same bits whatever rows share its step."""
    last = x.dim() > 0 and axis in (-1, x.dim() - 1) and not to_float
    found: Tensor = native.softmax(x) if last else A._softmax.default(x, axis, to_float)
    return found


ALIKE_ROWS: dict[Any, Row] = {
    **CPU_ROWS,
    A.linear.default: linear_alike,
    A._softmax.default: softmax_alike,
}
"""Those of steps that round what they compute with: float error grows there."""
