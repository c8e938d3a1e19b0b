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

from ...ir.ops.quant import linear_int8, quantize_tensor, round_rows, scale_back

LINEAR_INT8 = torch.ops.graftwork.linear_int8.default

WIDEST = 32
"""Rows of a step that are loops; for more, library products pay for unpacking weights."""

TOGETHER = 8
"""Rows that share one reading of the weights: their sums fit in 16 registers."""

_MASKS = (0xFF, 0xFF00, 0xFF0000, -(1 << 24))
"""One for each byte of a word. What a mask leaves is 2^(8j) times the byte, which the other factor
makes up for: no shift. The top byte keeps its sign; the others are stored with an offset."""

_OFFSET = 128

_EXACT = {False: 512, True: 256}
"""Columns summed in float32 at a time, by `coarse`: 512 * 255 * 127 and 256 * 255 * 255 are less
than 2^24, up to where float32 counts."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; loops for few rows in float32."""
    if x.shape[:-1].numel() > WIDEST or not x.dtype == weight.dtype == torch.float32:
        return F.linear(x, weight, bias)
    rows, whole = _in_groups(x.reshape(-1, x.shape[-1])), weight.unsqueeze(1)
    sums = [(whole * row).sum(-1) for row in _stored(rows).unbind(1)]
    result = _from_groups(sums, x.shape[:-1])
    return result if bias is None else result + bias


def pack(weight: Tensor, coarse: bool) -> Tensor:
    """Words f32[C, N, Q] of an int8 weight [N, K]: C chunks of 4Q columns, the last filled with 0.

    Byte j of word (c, n, i) is the weight of row n and column 4Qc + Qj + i. The words are called
    float32 because inductor loads vectors of float32 in one instruction; nothing computes with
    them as such.
    """
    rows, columns = weight.shape
    # Vectors of 8 or 16 words; of these chunks the one that leaves the fewest columns to fill up.
    chunk = min(range(_EXACT[coarse], 255, -64), key=lambda size: -columns % size)
    filled = F.pad(weight, (0, -columns % chunk))
    parts = filled.reshape(rows, -1, 4, chunk // 4).permute(1, 0, 3, 2)
    offsets = torch.tensor([_OFFSET] * 3 + [0], dtype=torch.uint8)
    packed = parts.contiguous().view(torch.uint8) + offsets  # modulo 256
    return packed.view(torch.float32).squeeze(-1)


def linear_packed(
    x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None = None, *, coarse: bool = False
) -> Tensor:
    """`linear_int8` with the words of a packed weight, or a plain one: the same bits."""
    packed = words.dtype != torch.int8
    if not packed or x.shape[:-1].numel() > WIDEST:
        weight = _unpack(words, x.shape[-1]) if packed else words
        result: Tensor = linear_int8(x, weight, scale, bias, coarse=coarse)
        return result
    values, row_scale = quantize_tensor(x) if coarse else round_rows(x)
    total = _products(values, words)
    return scale_back(total, x, row_scale, scale, bias)


def _products(values: Tensor, words: Tensor) -> Tensor:
    """Exact i32[..., N] of whole values f32[..., K] and a packed weight [N, K]."""
    chunks, _, quarter = words.shape
    values = F.pad(values, (0, 4 * quarter * chunks - values.shape[-1]))
    parts = values.unflatten(-1, (chunks, 4, quarter))
    offset = parts[..., :3, :].sum((-1, -2, -3)).to(torch.int32) * _OFFSET

    shares = torch.tensor([1.0, 2.0**-8, 2.0**-16, 2.0**-24]).view(4, 1)
    rows = _in_groups((parts * shares).reshape(-1, chunks, 4, quarter))
    # Chunks first, so that what all outputs read stays in the nearest cache.
    rows = _stored(rows.permute(2, 0, 1, 3, 4).contiguous())
    whole = words.view(torch.int32).unsqueeze(2)
    a, b, c, d = ((whole & mask).float() for mask in _MASKS)
    sums = []
    for row in rows.unsqueeze(1).unbind(3):
        e, f, g, h = row.unbind(-2)
        sums.append((a * e + b * f + c * g + d * h).sum(-1))
    sums = [part.to(torch.int32).sum(0, dtype=torch.int32) for part in sums]
    total: Tensor = _from_groups(sums, values.shape[:-1]) - offset.unsqueeze(-1)
    return total


def _in_groups(rows: Tensor) -> Tensor:
    """[M, ...] -> [G, M', ...]: groups of at most `TOGETHER` rows, filled up with zeros."""
    groups = -(-rows.shape[0] // TOGETHER)
    each = -(-rows.shape[0] // groups)
    padding = [0] * (2 * rows.dim() - 1) + [groups * each - rows.shape[0]]
    filled = F.pad(rows, padding)
    return filled.reshape(groups, each, *rows.shape[1:])


def _from_groups(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """A part [N, G] for each place in a group -> [*shape, N]."""
    rows = torch.stack(parts, -1).flatten(1)[:, : shape.numel()]
    return rows.t().reshape(*shape, -1)


def _stored(x: Tensor) -> Tensor:
    """x; the compiler stores it, and does not compute it anew for each output it is read for."""
    return x.as_strided(x.shape, x.stride())


def _unpack(words: Tensor, columns: int) -> Tensor:
    """The weight [N, K] as whole float32 numbers."""
    whole = words.view(torch.int32)
    parts = [(whole & mask).float() * 2.0 ** (-8 * j) for j, mask in enumerate(_MASKS)]
    parts = [part - _OFFSET if j < 3 else part for j, part in enumerate(parts)]
    return torch.stack(parts, 2).permute(1, 0, 2, 3).reshape(words.shape[1], -1)[:, :columns]


LOOPS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.linear.default: linear,
    LINEAR_INT8: linear_packed,
}
"""The rows that inductor has for the CPU only."""
