"""Steps of a few rows as loops that inductor writes itself for the CPU.

A step of decoding has few rows and reads every weight once. The library products that inductor
calls otherwise are made for many rows: in float32 two rows can take three times as long as one,
and for int8 none is exact, per row and fast without dot-product instructions. As loops, weights
are read once at the speed of memory.

Sums over a row, here and in norms and attention, are taken in one order whatever rows share the
step: a token's results have the same bits alone and among drafted ones. In int8 a last bit matters,
because rounding to whole numbers makes a step of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ir.ops.attention import attend_by
from ...ir.ops.norm import add_rms_norm_by, layer_norm_by, rms_norm_by
from ...ir.ops.quant import quantize_tensor, round_rows_by, scale_back
from .compiled import integer_vectors, multiplies_bytes
from .rows import Prepared, Row
from .rows import attend as library_attend

LINEAR_INT8 = torch.ops.graftwork.linear_int8.default

WIDEST = 32
"""Rows of a float32 step that are loops; for more, library products are faster."""

SHARED = 128
"""Query rows that share keys in a step whose attention is loops."""

BLOCKS = 4
"""Parts of a row whose sums, or largest values, are taken one by one. What reads more than four
values is worked out and stored by one thread while the others wait."""

ABOVE = 128
"""What makes signed bytes unsigned."""

TOGETHER = 8
"""Rows that share one reading of the weights: their sums fit in 16 registers."""

NEAR = 24 * 1024
"""Bytes of rows that stay in the nearest cache while weights pass through it."""

PAIRS = "AVX512" in torch.backends.cpu.get_cpu_capability()
"""Whether sums for two outputs at a time fit in registers, so that rows are read half as often."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; loops for few rows in float32."""
    if x.shape[:-1].numel() > WIDEST or not x.dtype == weight.dtype == torch.float32:
        return F.linear(x, weight, bias)
    result = _dots(weight, x)
    return result if bias is None else result + bias


def linear_exact(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    coarse: bool = False,
    sums: Tensor | None = None,
) -> Tensor:
    """`linear_int8` as loops of whole numbers: the same bits.

    Processors multiply pairs of 16-bit numbers and add the two products in one go, and those with
    dot-product instructions four pairs of an unsigned and a signed byte. With `sums` i32[N], each
    output's weights added up, it is bytes: activations above zero, and the shift is taken back.
    """
    # Stored, or it would be worked out twice, and by scalars where the whole numbers are made.
    x = _stored(x.contiguous())
    values, zero, row_scale = _steps(x, coarse)
    values = (values - zero).to(torch.int16) if sums is None else values.to(torch.uint8)
    # By way of 16 bits, or inductor would write these loops itself, in 32 bits.
    total = _dots(weight.to(torch.int16).to(torch.int32), values)
    if sums is not None:
        total = total - zero * sums
    return scale_back(total, x, row_scale, scale, bias)


def _steps(x: Tensor, coarse: bool) -> tuple[Tensor, Tensor | int, Tensor]:
    """(values in 0..255, their zero point, scale) as `linear_int8` rounds rows."""
    if coarse:
        values, zero, scale = quantize_tensor(x)
        return values, zero.to(torch.int32), scale
    values, scale = round_rows_by(_largest, x)
    return values + ABOVE, ABOVE, scale


def _largest(x: Tensor) -> Tensor:
    """The largest value over the last axis. Of a row alone block by block: its blocks are shared
    out among threads in passing, the row by itself would be a parallel region of its own."""
    if x.shape[:-1].numel() > 1:
        return x.amax(-1, keepdim=True)
    first, *others = _stored(_blocks(x).amax(-1, keepdim=True)).unbind(-2)
    largest: Tensor = functools.reduce(torch.maximum, others, first)
    return largest


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`graftwork.rms_norm`; its sum is the same in steps of any width."""
    return rms_norm_by(_mean, x, weight, eps=eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """`graftwork.add_rms_norm`; its sum is the same in steps of any width."""
    return add_rms_norm_by(_mean, x, residual, weight, eps=eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """`graftwork.layer_norm`; its sums are the same in steps of any width."""
    return layer_norm_by(_mean, x, weight, bias, eps=eps)


def _mean(x: Tensor) -> Tensor:
    """The mean over the last axis in a fixed order: block by block, then the blocks in a row.

    Where a step has one row, its sum would be shared out among threads and so add up otherwise.
    """
    first, *others = _stored(_blocks(x).sum(-1, keepdim=True)).unbind(-2)
    return sum(others, first) / x.shape[-1]


def _blocks(x: Tensor) -> Tensor:
    """Rows [..., K] of values, filled up with zeros, in parts [..., BLOCKS, K / BLOCKS]."""
    blocks: Tensor = F.pad(x, (0, -x.shape[-1] % BLOCKS)).unflatten(-1, (BLOCKS, -1))
    return blocks


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
    """`graftwork.attend`; loops where few query rows share keys, in float32."""
    few = q.shape[1] // k.shape[1] * q.shape[2] <= SHARED and q.dtype == torch.float32
    if not few:
        whole: Tensor = library_attend(q, k, v, mask, bias, sinks, scale=scale, softcap=softcap)
        return whole
    # Stored, so that neither is worked out again by loops that would have to gather it.
    q = _stored(q.contiguous())
    result = attend_by(_product, q, k, v, mask, bias, sinks, scale=scale, softcap=softcap)
    return _stored(result.contiguous())


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` of a few rows [B,G,R,K] with [B,G,K,N]."""
    batch, groups, rows, inner = a.shape
    parts = -(-rows // TOGETHER)
    each = -(-rows // parts)
    filled = F.pad(a, (0, 0, 0, each * parts - rows))
    grouped = _stored(filled.reshape(batch, groups, parts, each, inner))
    whole = b.unsqueeze(2)
    sums = [(row.unsqueeze(-1) * whole).sum(-2) for row in grouped.unbind(3)]
    return _stored(torch.stack(sums, 3)).flatten(2, 3)[:, :, :rows]


def _dots(weight: Tensor, x: Tensor) -> Tensor:
    """Products of rows [..., K] and weights [N, K] added up, [..., N] in the weights' dtype.

    At most `TOGETHER` rows share a reading of the weights; the last group is filled up with zeros.
    """
    rows, outputs = x.shape[:-1].numel(), weight.shape[0]
    groups = -(-rows // TOGETHER)
    each = -(-rows // groups)
    filled = F.pad(x.reshape(rows, -1), (0, 0, 0, groups * each - rows))
    parts = _stored(filled.reshape(each, groups, 1, -1)).unbind(0)
    crowded = PAIRS and each * parts[0][0].nbytes > NEAR
    paired = 2 if crowded and outputs % 2 == 0 else 1
    sums = [
        (one * part.to(weight.dtype)).sum(-1, keepdim=True, dtype=weight.dtype)
        for one in weight.unflatten(0, (-1, paired)).unbind(1)
        for part in parts
    ]
    # Side by side, and turned around after: rows of results N apart, often a power of two, would
    # drive each other and x out of the cache.
    result = torch.cat(sums, -1).unflatten(-1, (paired, each)).permute(3, 0, 1, 2)
    return _stored(result.reshape(-1, outputs)[:rows].contiguous()).reshape(*x.shape[:-1], outputs)


def _stored(x: Tensor) -> Tensor:
    """x; the compiler stores it, and does not compute it anew for each output it is read for."""
    return x.as_strided(x.shape, x.stride())


def row_sums(weight: Tensor) -> Tensor:
    """Each row's whole numbers i8[N,K] added up, i32[N]."""
    return weight.sum(-1, dtype=torch.int32)


def loops() -> dict[Any, Row]:
    """The rows that inductor has for the CPU only."""
    rows: dict[Any, Row] = {
        torch.ops.aten.linear.default: linear,
        torch.ops.graftwork.attend.default: attend,
        torch.ops.graftwork.rms_norm.default: rms_norm,
        torch.ops.graftwork.add_rms_norm.default: add_rms_norm,
        torch.ops.graftwork.layer_norm.default: layer_norm,
    }
    if integer_vectors() is not None:
        sums = {"sums": (1, row_sums)} if multiplies_bytes() else {}
        rows[LINEAR_INT8] = Prepared(linear_exact, sums)
    return rows
