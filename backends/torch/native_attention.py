"""Attention over caches as torch ops of the kernels in `kernels/`, as those of `native` are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cached_library import SHARED
from .native import Kernel, native_op, twin

attend_kernel = Kernel("attend", SHARED)
attend_rows_kernel = Kernel("attend_rows", SHARED)
quantize_rows_kernel = Kernel("quantize_rows", SHARED)
FLOATS = 32
"""Bits of rows that are stored as they are."""


@native_op(*twin("attend", "q k v bias sinks"))
def attend(
    result: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> None:
    """`graftwork.attend` in float32, mask bool[B,1,T,C] and bias f32[B,H,T,C] in full; a softcap
    of 0 is none."""
    tensors = q, k, v, None, None, mask, bias, sinks, result, None
    how = scale, softcap or 0.0, FLOATS, 0, torch.get_num_threads()
    attend_kernel(*tensors, *_sizes(q, k, result), *how)


@native_op(*twin("attend_part", "q k v bias sinks"))
def attend_part(
    results: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> None:
    """`graftwork.attend_part` in float32, otherwise as `attend`."""
    tensors = q, k, v, None, None, mask, bias, sinks, *results
    how = scale, softcap or 0.0, FLOATS, 0, torch.get_num_threads()
    attend_kernel(*tensors, *_sizes(q, k, results[0]), *how)


@native_op(*twin("attend_quantized", "q bias sinks"))
def attend_quantized(
    result: Tensor,
    q: Tensor,
    k: Tensor,
    k_steps: Tensor,
    v: Tensor,
    v_steps: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    bits: int,
    turned: bool,
    scale: float,
    softcap: float | None,
) -> None:
    """`graftwork.attend_quantized` in float32, otherwise as `attend`."""
    tensors = q, k, v, k_steps, v_steps, mask, bias, sinks, result, None
    how = scale, softcap or 0.0, bits, int(turned), torch.get_num_threads()
    attend_kernel(*tensors, *_sizes(q, k, result), *how)


def _sizes(q: Tensor, k: Tensor, result: Tensor) -> tuple[int, ...]:
    """B, H, G, T, C, D and E."""
    batch, heads, width, dim = q.shape
    return batch, heads, k.shape[1], width, k.shape[2], dim, result.shape[3]


@native_op(*twin("attend_rows", "q k v sinks"))
def attend_rows(
    result: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> None:
    """`graftwork.attend_rows` in float32; a softcap of 0 is none."""
    batch, heads, width, dim = q.shape
    groups, capacity, wide = v.shape[1:]
    sizes = batch, heads, groups, rows.shape[1], width, capacity, dim, wide, rows.shape[3]
    tensors = q, k, v, rows, sinks, result
    attend_rows_kernel(*tensors, *sizes, scale, softcap or 0.0, torch.get_num_threads())


@native_op(*twin("quantize_rows", "x"))
def quantize_rows(results: tuple[Tensor, Tensor], x: Tensor, bits: int, turned: bool) -> None:
    """`graftwork.quantize_rows` in float32."""
    sizes = x.shape[:3].numel(), x.shape[3], bits, int(turned)
    quantize_rows_kernel(x, *results, *sizes)
