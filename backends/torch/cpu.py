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

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ir.ops import norm, quantized_cache, shared, sparse
from ...ir.ops.attention import check_attend
from . import native, native_attention, native_quantized, native_recurrent
from .rows import Row
from .rows import attend as library_attend

A = torch.ops.aten

MOST_BEST = 64
"""Largest values that are kept in order one by one; for more of them there are better ways."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; native in float32."""
    plain = len(weight.shape) == 2 and _per_column(weight.shape[:1], bias)
    if not plain or not _float32(x, weight, bias):
        return F.linear(x, weight, bias)
    result: Tensor = native.linear_float32(x, weight)
    return result if bias is None else result + bias


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`graftwork.rms_norm`; native in float32, unless the weight is broadcast."""
    normal: Tensor
    if _float32(x, weight) and _per_column(x.shape[-1:], weight):
        normal = native.rms_norm(x, weight, eps)
    else:
        normal = norm.rms_norm(x, weight, eps=eps)
    return normal


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """`graftwork.add_rms_norm`; native in float32, unless something is broadcast."""
    both: tuple[Tensor, Tensor]
    plain = x.shape == residual.shape and _per_column(x.shape[-1:], weight)
    if plain and _float32(x, residual, weight):
        both = native.add_rms_norm(x, residual, weight, eps)
    else:
        both = norm.add_rms_norm(x, residual, weight, eps=eps)
    return both


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """`graftwork.layer_norm`; native in float32."""
    normal: Tensor
    if _float32(x, weight, bias) and _per_column(x.shape[-1:], weight, bias):
        normal = native.layer_norm(x, weight, bias, eps)
    else:
        normal = norm.layer_norm(x, weight, bias, eps=eps)
    return normal


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`graftwork.attend`; native in float32."""
    check_attend(q, k, v, mask, bias, sinks)
    # To the kernel a softcap of 0 is none.
    if not _float32(q, k, v) or softcap == 0:
        whole: Tensor = library_attend(q, k, v, mask, bias, sinks, scale=scale, softcap=softcap)
        return whole
    bias = None if bias is None else bias.float()
    sinks = None if sinks is None else sinks.float()
    result: Tensor = native_attention.attend(q, k, v, mask, bias, sinks, scale, softcap or 0.0)
    return result


def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`graftwork.attend_part`; native in float32."""
    check_attend(q, k, v, mask, bias, sinks)
    found: tuple[Tensor, Tensor]
    if not _float32(q, k, v) or softcap == 0:
        found = shared.attend_part(q, k, v, mask, bias, sinks, scale=scale, softcap=softcap)
        return found
    bias = None if bias is None else bias.float()
    sinks = None if sinks is None else sinks.float()
    found = native_attention.attend_part(q, k, v, mask, bias, sinks, scale, softcap or 0.0)
    return found


def attend_quantized(
    q: Tensor,
    k: Tensor,
    k_steps: Tensor,
    v: Tensor,
    v_steps: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    bits: int,
    turned: bool,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`graftwork.attend_quantized`; native for queries in float32."""
    stored = q, k, k_steps, v, v_steps, mask
    if not _float32(q) or softcap == 0:
        whole: Tensor = quantized_cache.attend_quantized(
            *stored, bias, sinks, bits=bits, turned=turned, scale=scale, softcap=softcap
        )
        return whole
    bias = None if bias is None else bias.float()
    sinks = None if sinks is None else sinks.float()
    result: Tensor = native_attention.attend_quantized(
        *stored, bias, sinks, bits, turned, scale, softcap or 0.0
    )
    return result


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`graftwork.attend_rows`; native in float32."""
    found: Tensor
    if _float32(q, k, v) and softcap != 0:
        own = None if sinks is None else sinks.float()
        found = native_attention.attend_rows(q, k, v, rows, own, scale, softcap or 0.0)
    else:
        found = sparse.attend_rows(q, k, v, rows, sinks, scale=scale, softcap=softcap)
    return found


def quantize_rows(x: Tensor, *, bits: int, turned: bool) -> tuple[Tensor, Tensor]:
    """`graftwork.quantize_rows`; native."""
    found: tuple[Tensor, Tensor] = native_attention.quantize_rows(x.float(), bits, turned)
    return found


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
    checked = [
        None if part is None else _inside(part, x.shape[axis], signed=True)
        for axis, part in enumerate(indices)
    ]
    found: Tensor = A.index.Tensor(x, checked)
    return found


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`aten.index_put`, its indices checked as those of `index`."""
    checked = [
        None if part is None else _inside(part, x.shape[axis], signed=True)
        for axis, part in enumerate(indices)
    ]
    found: Tensor = A.index_put.default(x, checked, values, accumulate)
    return found


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
    torch.ops.graftwork.attend.default: attend,
    torch.ops.graftwork.attend_part.default: attend_part,
    torch.ops.graftwork.attend_quantized.default: attend_quantized,
    torch.ops.graftwork.attend_rows.default: attend_rows,
    torch.ops.graftwork.quantize_rows.default: quantize_rows,
    torch.ops.graftwork.linear_attention_step.default: native_recurrent.step,
    torch.ops.graftwork.linear_attention_step_int8.default: native_recurrent.step_int8,
    torch.ops.graftwork.causal_conv_step.default: native_recurrent.conv_step,
    torch.ops.graftwork.rms_norm.default: rms_norm,
    torch.ops.graftwork.add_rms_norm.default: add_rms_norm,
    torch.ops.graftwork.layer_norm.default: layer_norm,
}
"""The rows that inductor has for the CPU only."""
