"""Attention over caches as torch ops of the kernels in `kernels/`, as those of `native` are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir import InputError
from ...ir.ops.attention import check_attend
from ...ir.ops.operands import Operands
from ...ir.ops.quantized_cache import check_attend_quantized, check_stored
from ...ir.ops.sparse import check_attend_rows
from ..cached_library import SHARED
from .native import F32, Kernel, native_op

attend_kernel = Kernel("attend", SHARED)
attend_rows_kernel = Kernel("attend_rows", SHARED)
quantize_rows_kernel = Kernel("quantize_rows", SHARED)
FLOATS = 32
"""Bits of rows that are stored as they are."""


def _attend_like(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _check_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> None:
    check_attend(q, k, v, mask, bias, sinks)
    for tensor in (q, k, v, bias, sinks):
        if tensor is not None and tensor.dtype != F32:
            raise InputError(f"attend: the kernel takes {F32}, got {tensor.dtype}")


@native_op(
    "attend(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? bias, Tensor? sinks, float scale, "
    "float softcap) -> Tensor",
    _check_attend,
    _attend_like,
)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """`graftwork.attend` in float32, mask bool[B,1,T,C] and bias f32[B,H,T,C] in full; a softcap
    of 0 is none."""
    result = _attend_like(q, k, v)
    batch, heads, width, dim = q.shape
    groups, rows, wide = v.shape[1:]
    sizes = batch, heads, groups, width, rows, dim, wide
    tensors = q, k, v, None, None, mask, bias, sinks, result, None
    attend_kernel(*tensors, *sizes, scale, softcap, FLOATS, 0, torch.get_num_threads())
    return result


def _attend_part_like(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _attend_like(q, k, v), q.new_empty(q.shape[:3])


@native_op(
    "attend_part(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? bias, Tensor? sinks, "
    "float scale, float softcap) -> (Tensor, Tensor)",
    _check_attend,
    _attend_part_like,
)
def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """`graftwork.attend_part` in float32, otherwise as `attend`."""
    result, weight = _attend_part_like(q, k, v)
    batch, heads, width, dim = q.shape
    groups, rows, wide = v.shape[1:]
    sizes = batch, heads, groups, width, rows, dim, wide
    tensors = q, k, v, None, None, mask, bias, sinks, result, weight
    attend_kernel(*tensors, *sizes, scale, softcap, FLOATS, 0, torch.get_num_threads())
    return result, weight


def _check_attend_quantized(
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
    softcap: float,
) -> None:
    check_attend_quantized(q, k, k_steps, v, v_steps, mask, bias, sinks, bits, turned)
    for tensor in (q, bias, sinks):
        if tensor is not None and tensor.dtype != F32:
            raise InputError(f"attend_quantized: the kernel takes {F32}, got {tensor.dtype}")


def _attend_quantized_like(
    q: Tensor, k: Tensor, k_steps: Tensor, v: Tensor, *others: Any
) -> Tensor:
    bits = others[4]
    return q.new_empty((*q.shape[:3], v.shape[3] * 8 // bits))


@native_op(
    "attend_quantized(Tensor q, Tensor k, Tensor k_steps, Tensor v, Tensor v_steps, Tensor mask, "
    "Tensor? bias, Tensor? sinks, int bits, bool turned, float scale, float softcap) -> Tensor",
    _check_attend_quantized,
    _attend_quantized_like,
)
def attend_quantized(
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
    softcap: float,
) -> Tensor:
    """`graftwork.attend_quantized` in float32, otherwise as `attend`."""
    result = _attend_quantized_like(q, k, k_steps, v, v_steps, mask, bias, sinks, bits)
    batch, heads, width, dim = q.shape
    groups, rows = k.shape[1:3]
    sizes = batch, heads, groups, width, rows, dim, result.shape[3]
    tensors = q, k, v, k_steps, v_steps, mask, bias, sinks, result, None
    attend_kernel(*tensors, *sizes, scale, softcap, bits, int(turned), torch.get_num_threads())
    return result


def _check_attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> None:
    check_attend_rows(q, k, v, rows, sinks)
    for tensor in (q, k, v, sinks):
        if tensor is not None and tensor.dtype != F32:
            raise InputError(f"attend_rows: the kernel takes {F32}, got {tensor.dtype}")


@native_op(
    "attend_rows(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor? sinks, float scale, "
    "float softcap) -> Tensor",
    _check_attend_rows,
    _attend_like,
)
def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """`graftwork.attend_rows` in float32; a softcap of 0 is none."""
    result = _attend_like(q, k, v)
    batch, heads, width, dim = q.shape
    groups, capacity, wide = v.shape[1:]
    sizes = batch, heads, groups, width, capacity, dim, wide, rows.shape[3]
    tensors = q, k, v, rows, sinks, result
    attend_rows_kernel(*tensors, *sizes, scale, softcap, torch.get_num_threads())
    return result


def _check_quantize_rows(x: Tensor, bits: int, turned: bool) -> None:
    Operands("quantize_rows").fit("x", x, "BGTD", F32)
    check_stored("quantize_rows", x.shape[3], bits, turned)


def _quantize_rows_like(x: Tensor, bits: int, turned: bool) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((*x.shape[:3], x.shape[3] * bits // 8), dtype=torch.uint8)
    return codes, x.new_empty((*x.shape[:3], 2))


@native_op(
    "quantize_rows(Tensor x, int bits, bool turned) -> (Tensor, Tensor)",
    _check_quantize_rows,
    _quantize_rows_like,
)
def quantize_rows(x: Tensor, bits: int, turned: bool) -> tuple[Tensor, Tensor]:
    """`graftwork.quantize_rows` in float32."""
    codes, steps = _quantize_rows_like(x, bits, turned)
    sizes = x.shape[:3].numel(), x.shape[3], bits, int(turned)
    quantize_rows_kernel(x, codes, steps, *sizes)
    return codes, steps
