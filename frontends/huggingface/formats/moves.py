"""Moves of stored values that formats share: transposed, unpacked from words, zeros as offsets."""

from __future__ import annotations

import torch

from ....ir import TensorType, Weight, derivation, derive
from ....ir.ops.numerics import unpack

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""What scales come in."""

INT = (torch.int32,)
"""Words that codes are packed in."""

PADDED = 10
"""Values of 3 bits in a word of files that leave two bits of it unused."""


def sizes(weight: Weight) -> tuple[int, ...]:
    """A weight's dims as numbers."""
    return tuple(int(str(dim)) for dim in weight.type.dims)


def fits(words: int, bits: int, count: int) -> bool:
    """Whether so many int32 words hold `count` values: as a bitstream, or ten of 3 bits each."""
    return words * 32 == count * bits or (bits == 3 and words == -(-count // PADDED))


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The values i32[R,count] of words i32[R,W]."""
    if words.shape[1] * 32 == count * bits:
        return unpack(words.contiguous().view(torch.uint8), bits)
    places = torch.arange(PADDED, dtype=torch.int32) * bits
    found: torch.Tensor = (words.unsqueeze(-1) >> places) % 2**bits
    return found.flatten(1)[:, :count]


def transposed(name: str, weight: Weight) -> Weight:
    """A weight [A,B] as [B,A]."""
    type = TensorType(weight.type.dtype, tuple(reversed(weight.type.dims)))
    return derive(name, type, torch.ops.aten.t.default, weight)


def offsets(name: str, scales: Weight, points: Weight, *, by_row: bool = False) -> Weight:
    """-scale * z as f32[N,G] of scales [G,N], or [N,G] if they are by row, and zero points laid as
    they are: exact for scales of at most 16 bits."""
    dims = sizes(scales) if by_row else sizes(scales)[::-1]
    type = TensorType(torch.float32, dims)
    return derive(name, type, minus_points, scales, points, by_row=by_row)


@derivation
def minus_points(scale: torch.Tensor, points: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """-scale * z, transposed unless scales are by row."""
    values = -scale.float() * points
    return values if by_row else values.T.contiguous()
