"""Linear layers of a few rows as loops that inductor writes itself for the CPU.

A step of decoding has few rows and reads every weight once. The library products that inductor
calls otherwise are made for many rows: in float32 two rows can take three times as long as one,
and for int8 none is exact, per row and fast without dot-product instructions. As loops, weights
are read once at the speed of memory, and a row's result is the same whatever rows share its step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ir.ops.quant import quantize_tensor, round_rows, scale_back
from .compiled import integer_vectors

LINEAR_INT8 = torch.ops.graftwork.linear_int8.default

WIDEST = 32
"""Rows of a float32 step that are loops; for more, library products are faster."""

TOGETHER = 8
"""Rows that share one reading of the weights: their sums fit in 16 registers."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; loops for few rows in float32."""
    if x.shape[:-1].numel() > WIDEST or not x.dtype == weight.dtype == torch.float32:
        return F.linear(x, weight, bias)
    result = torch.cat([(weight * row).sum(-1) for row in _groups(x)])
    result = _rows_of(result, x)
    return result if bias is None else result + bias


def linear_exact(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, coarse: bool = False
) -> Tensor:
    """`linear_int8` as loops of whole numbers: the same bits."""
    values, row_scale = quantize_tensor(x) if coarse else round_rows(x)
    # 16 bits, because processors multiply pairs of them and add the two products in one go.
    whole = weight.to(torch.int16).to(torch.int32)
    sums = [
        (whole * row.to(torch.int32)).sum(-1, dtype=torch.int32)
        for row in _groups(values.to(torch.int16))
    ]
    return scale_back(_rows_of(torch.cat(sums), x), x, row_scale, scale, bias)


def _groups(x: Tensor) -> tuple[Tensor, ...]:
    """Rows [..., K] as at most `TOGETHER` parts [G, 1, K]; the last is filled up with zeros."""
    rows = x.shape[:-1].numel()
    groups = -(-rows // TOGETHER)
    each = -(-rows // groups)
    filled = F.pad(x.reshape(rows, -1), (0, 0, 0, groups * each - rows))
    return _stored(filled.reshape(each, groups, 1, -1)).unbind(0)


def _rows_of(result: Tensor, x: Tensor) -> Tensor:
    """The parts' results [G * M, N], one after the other, as results of the rows of x."""
    return result[: x.shape[:-1].numel()].reshape(*x.shape[:-1], -1)


def _stored(x: Tensor) -> Tensor:
    """x; the compiler stores it, and does not compute it anew for each output it is read for."""
    return x.as_strided(x.shape, x.stride())


def loops() -> dict[Any, Callable[..., Any]]:
    """The rows that inductor has for the CPU only."""
    rows: dict[Any, Callable[..., Any]] = {torch.ops.aten.linear.default: linear}
    if integer_vectors() is not None:
        rows[LINEAR_INT8] = linear_exact
    return rows
