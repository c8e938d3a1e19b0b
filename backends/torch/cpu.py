"""What inductor runs steps with on the CPU: native kernels.

A step of decoding has few rows and reads every weight once. Library products are made for many
rows: in float32 two rows can take three times as long as one, and for int8 none is exact, per row
and fast. The kernels read weights at the speed of memory. Of many rows, such as a prompt's, the
library that torch comes with multiplies fast on its maker's processors, and at a quarter of that
speed on others; the kernels are as fast on both.

They take sums over a row, in norms and attention, too, in one order whatever rows share the step:
a token's results have the same bits alone and among drafted ones. In int8 a last bit matters,
because rounding to whole numbers makes a step of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ir.ops import norm
from . import native
from .rows import Prepared, Row
from .rows import attend as library_attend


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; native in float32."""
    if not _float32(x, weight):
        return F.linear(x, weight, bias)
    result: Tensor = native.linear_float32(x.contiguous(), weight)
    return result if bias is None else result + bias


def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    coarse: bool = False,
    sums: Tensor,
) -> Tensor:
    """`graftwork.linear_int8`, the same bits. sums i32[N]: each output's weights added up."""
    result: Tensor
    result = native.linear_int8(x.float().contiguous(), weight, scale.float(), sums, coarse)
    return (result if bias is None else result + bias.float()).to(x.dtype)


def row_sums(weight: Tensor) -> Tensor:
    """Each row's whole numbers i8[N,K] added up, i32[N]."""
    return weight.sum(-1, dtype=torch.int32)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`graftwork.rms_norm`; native in float32."""
    normal: Tensor
    if _float32(x, weight):
        normal = native.rms_norm(x.contiguous(), weight, eps)
    else:
        normal = norm.rms_norm(x, weight, eps=eps)
    return normal


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """`graftwork.add_rms_norm`; native in float32."""
    both: tuple[Tensor, Tensor]
    if _float32(x, residual, weight):
        both = native.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
    else:
        both = norm.add_rms_norm(x, residual, weight, eps=eps)
    return both


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """`graftwork.layer_norm`; native in float32."""
    normal: Tensor
    if _float32(x, weight):
        normal = native.layer_norm(x.contiguous(), weight, bias, eps)
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
    if not _float32(q, k, v):
        whole: Tensor = library_attend(q, k, v, mask, bias, sinks, scale=scale, softcap=softcap)
        return whole
    batch, heads, width, _ = q.shape
    everywhere = mask.expand(batch, 1, width, k.shape[2]).contiguous()
    if bias is not None:
        bias = bias.float().expand(batch, heads, width, k.shape[2]).contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    result: Tensor = native.attend(q, k, v, everywhere, bias, sinks, scale, softcap or 0.0)
    return result


def _float32(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 for tensor in tensors)


CPU_ROWS: dict[Any, Row] = {
    torch.ops.aten.linear.default: linear,
    torch.ops.graftwork.linear_int8.default: Prepared(linear_int8, {"sums": (1, row_sums)}),
    torch.ops.graftwork.attend.default: attend,
    torch.ops.graftwork.rms_norm.default: rms_norm,
    torch.ops.graftwork.add_rms_norm.default: add_rms_norm,
    torch.ops.graftwork.layer_norm.default: layer_norm,
}
"""The rows that inductor has for the CPU only."""
