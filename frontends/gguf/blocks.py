"""Block types of GGUF: what bits a block has, and what they stand for.

A row of a tensor is a row of blocks, each of so many values. All types come to one of the kinds
of `ir.ops.numerics`, with the values that llama.cpp and the `gguf` package compute in float32, bit
for bit:

    scale * (q - 2^(bits-1))    Q4_0, Q5_0, Q8_0, Q3_K, Q6_K
    scale * q + offset          Q4_1, Q5_1, Q2_K, Q4_K, Q5_K, TQ1_0, TQ2_0
    scale * codebook[q]         IQ4_NL, IQ4_XS, MXFP4

What the package can unpack and this list lacks (codebooks of vectors: IQ1, IQ2, IQ3) is kept in 8
bits, see `EIGHT`. Five bits are stored in six. In K types scales are themselves quantized: d * s,
with d in float16 for 256 values and s of a few bits for 16 or 32, which float32 holds exactly.
Source: the format's description and package (ggml).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ir.ops.numerics import Numeric, Quantized, unpack

Part = Callable[[Tensor], Tensor]
Made = Callable[[Tensor, Tensor, Tensor | None], Tensor]

SIGNED4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The codebook of IQ4 types."""

FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The codebook of MXFP4: floats of 4 bits, doubled."""

EIGHT = Numeric(8, 32)
"""How types are kept that have no form of their own here: to 1/254 of the largest of 32 values."""


@dataclass(frozen=True)
class BlockType:
    """A type of blocks. values, size: how many values and bytes a block has. bits, group, kind: how
    they are kept. codes, scales, offsets: of blocks u8[R,size], q u8[R,values], and scales and
    offsets [R,values/group]. written: blocks of these, see `encoded`; None: of a type that is
    only copied."""

    name: str
    values: int
    size: int
    bits: int
    group: int
    kind: str
    codes: Part
    scales: Part
    offsets: Part | None = None
    codebook: tuple[int, ...] = ()
    half: bool = False
    written: Made | None = None

    @property
    def numeric(self) -> Numeric:
        """How weights of this type are kept."""
        scale = torch.float16 if self.half else torch.float32
        return Numeric(self.bits, self.group, self.kind, scale)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of each block, f16[R,1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


def _shifted(part: Tensor, run: int, shifts: tuple[int, ...], bits: int) -> Tensor:
    """Fields of bytes [R,W]: of each run of bytes the fields at the first shift, then those at the
    next, ..., u8[R,W*shifts]."""
    # Several bytes at once: no field lies in two, so the mask takes away what a shift brings in.
    together = math.gcd(run, 8)
    rows = part.clone(memory_format=torch.contiguous_format)  # of one row, too: it is viewed
    runs = rows.view(_WHOLE[together]).reshape(len(part), -1, 1, run // together)
    mask = int.from_bytes(bytes([2**bits - 1] * together), "little")
    found = torch.cat([runs >> shift for shift in shifts], 2) & mask
    return found.flatten(1).view(torch.uint8)


def _nibbles(blocks: Tensor, start: int, run: int = 16) -> Tensor:
    """Lower nibbles of each run of bytes, then the upper ones."""
    return _shifted(blocks[:, start:], run, (0, 4), 4)


def _fifth(blocks: Tensor, start: int) -> Tensor:
    """Bits 0 to 31 of a word, as 0 or 16."""
    word = blocks[:, start : start + 4].contiguous().view(torch.int32).long()
    return ((word >> torch.arange(32)) & 1).to(torch.uint8) * 16


def _eights(part: Tensor, worth: int) -> Tensor:
    """Bit i // 32 of byte i % 32, for 256 values, as 0 or `worth`."""
    return _shifted(part, 32, (0, 1, 2, 3, 4, 5, 6, 7), 1) * worth


def _six_bits(blocks: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Scales and minima f32[R,8] of Q4_K and Q5_K: six bits each, in 12 bytes."""
    low, high, rest = blocks[:, start : start + 12].split(4, 1)
    scales = torch.cat([low & 63, (rest & 15) | (low >> 2 & 48)], 1)
    minima = torch.cat([high & 63, (rest >> 4) | (high >> 2 & 48)], 1)
    return scales.float(), minima.float()


def _q3_scales(blocks: Tensor) -> Tensor:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    six = _shifted(low, 8, (0, 4), 4) | (_shifted(high, 4, (0, 2, 4, 6), 2) << 4)
    return _half(blocks, 108).float() * (six.float() - 32)


def _xs_scales(blocks: Tensor) -> Tensor:
    word = blocks[:, 2:4].contiguous().view(torch.int16).long()
    high = (word >> torch.arange(0, 16, 2)) & 3
    low = _shifted(blocks[:, 4:8], 1, (0, 4), 4)
    return _half(blocks, 0).float() * ((low.long() | high << 4).float() - 32)


def _q6_codes(blocks: Tensor) -> Tensor:
    low = _shifted(blocks[:, :128], 64, (0, 4), 4)
    return low | (_shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 2) << 4)


def _thirds(blocks: Tensor) -> Tensor:
    """TQ1_0: five digits of base 3 a byte, scaled so that the next is always the highest."""

    def digits(part: Tensor, count: int) -> Tensor:
        powers = torch.tensor([3**n for n in range(count)], dtype=torch.uint8)
        return (part[:, None] * powers[:, None]).flatten(1)

    found = [digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)]
    return (torch.cat(found, 1).int() * 3 >> 8).to(torch.uint8)


def _power(blocks: Tensor) -> Tensor:
    """Half of 2^(e - 127) for the first byte e, f32[R,1]."""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), exponent - 1 << 23)
    return bits.to(torch.int32).view(torch.float32)


def _words(*halves: Tensor | None) -> list[Tensor]:
    """Scales and offsets [R,1] as bytes of float16."""
    return [h.half().contiguous().view(torch.uint8) for h in halves if h is not None]


def _of_nibbles(codes: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    low, high = (codes & 15).split(16, 1)
    return torch.cat([*_words(scale, offset), low | high << 4], 1)


def _of_five(codes: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Fifth bits are a word of their own, before the nibbles."""
    bits = (codes >> 4 & 1).reshape(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
    low, high = (codes & 15).split(16, 1)
    fifth = bits.sum(-1, dtype=torch.uint8)
    return torch.cat([*_words(scale, offset), fifth, low | high << 4], 1)


def _of_powers(codes: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    exponent = (scale.log2().round() + 128).clamp(0, 255).to(torch.uint8)
    low, high = codes.split(16, 1)
    return torch.cat([exponent, low | high << 4], 1)


TYPES: dict[int, BlockType] = {
    2: BlockType(
        *("Q4_0", 32, 18, 4, 32, "symmetric"),
        lambda b: _nibbles(b, 2),
        lambda b: _half(b, 0),
        half=True,
        written=_of_nibbles,
    ),
    3: BlockType(
        *("Q4_1", 32, 20, 4, 32, "affine"),
        lambda b: _nibbles(b, 4),
        lambda b: _half(b, 0),
        lambda b: _half(b, 2),
        half=True,
        written=_of_nibbles,
    ),
    6: BlockType(
        *("Q5_0", 32, 22, 6, 32, "symmetric"),
        lambda b: _nibbles(b, 6) + _fifth(b, 2) + 16,
        lambda b: _half(b, 0),
        half=True,
        written=lambda codes, scale, offset: _of_five(codes - 16, scale, offset),
    ),
    7: BlockType(
        *("Q5_1", 32, 24, 6, 32, "affine"),
        lambda b: _nibbles(b, 8) + _fifth(b, 4),
        lambda b: _half(b, 0),
        lambda b: _half(b, 2),
        half=True,
        written=_of_five,
    ),
    8: BlockType(
        *("Q8_0", 32, 34, 8, 32, "symmetric"),
        lambda b: b[:, 2:] ^ 128,
        lambda b: _half(b, 0),
        half=True,
        written=lambda codes, scale, offset: torch.cat([*_words(scale), codes ^ 128], 1),
    ),
    10: BlockType(
        *("Q2_K", 256, 84, 2, 16, "affine"),
        lambda b: _shifted(b[:, 16:80], 32, (0, 2, 4, 6), 2),
        lambda b: _half(b, 80).float() * (b[:, :16] & 15).float(),
        lambda b: -(_half(b, 82).float() * (b[:, :16] >> 4).float()),
    ),
    11: BlockType(
        *("Q3_K", 256, 110, 3, 16, "symmetric"),
        lambda b: _shifted(b[:, 32:96], 32, (0, 2, 4, 6), 2) + _eights(b[:, :32], 4),
        _q3_scales,
    ),
    12: BlockType(
        *("Q4_K", 256, 144, 4, 32, "affine"),
        lambda b: _nibbles(b, 16, 32),
        lambda b: _half(b, 0).float() * _six_bits(b, 4)[0],
        lambda b: -(_half(b, 2).float() * _six_bits(b, 4)[1]),
    ),
    13: BlockType(
        *("Q5_K", 256, 176, 6, 32, "affine"),
        lambda b: _nibbles(b, 48, 32) + _eights(b[:, 16:48], 16),
        lambda b: _half(b, 0).float() * _six_bits(b, 4)[0],
        lambda b: -(_half(b, 2).float() * _six_bits(b, 4)[1]),
    ),
    14: BlockType(
        *("Q6_K", 256, 210, 6, 16, "symmetric"),
        _q6_codes,
        lambda b: _half(b, 208).float() * b[:, 192:208].contiguous().view(torch.int8).float(),
    ),
    20: BlockType(
        *("IQ4_NL", 32, 18, 4, 32, "codebook"),
        lambda b: _nibbles(b, 2),
        lambda b: _half(b, 0),
        codebook=SIGNED4,
        half=True,
        written=_of_nibbles,
    ),
    23: BlockType(
        *("IQ4_XS", 256, 136, 4, 32, "codebook"),
        lambda b: _nibbles(b, 8),
        _xs_scales,
        codebook=SIGNED4,
    ),
    34: BlockType(
        *("TQ1_0", 256, 54, 2, 256, "affine"),
        _thirds,
        lambda b: _half(b, 52),
        lambda b: -_half(b, 52),
        half=True,
    ),
    35: BlockType(
        *("TQ2_0", 256, 66, 2, 256, "affine"),
        lambda b: _shifted(b[:, :64], 32, (0, 2, 4, 6), 2),
        lambda b: _half(b, 64),
        lambda b: -_half(b, 64),
        half=True,
    ),
    39: BlockType(
        *("MXFP4", 32, 17, 4, 32, "codebook"),
        lambda b: _nibbles(b, 1),
        _power,
        codebook=FLOAT4,
        written=_of_powers,
    ),
}
"""Types of few bits by their numbers."""

FLOATS: dict[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of one float a value."""


def encoded(numeric: Numeric, stored: Quantized) -> tuple[int, Tensor] | None:
    """The type of fewest bytes that has exactly these codes, scales and offsets, and its blocks
    u8[R,W] of the rows [R,K]; None if no type that is written has. Values of fewer bits stand among
    those of more where the scale is the same.

    >>> weight = Numeric(4, 64, "symmetric", torch.float16)
    >>> kind, blocks = encoded(weight, weight.quantize(torch.eye(64)))
    >>> TYPES[kind].name, blocks.shape
    ('Q4_0', torch.Size([64, 36]))
    """
    codes = unpack(stored.weight, numeric.bits)
    rows = codes.shape[:-1].numel()
    for number, kind in sorted(TYPES.items(), key=lambda item: item[1].size / item[1].values):
        if kind.written is None or kind.kind != numeric.kind or numeric.group % kind.values:
            continue
        book = () if stored.codebook is None else tuple(stored.codebook.flatten().tolist())
        if book != kind.codebook:
            continue
        middle = 2 ** (kind.bits - 1) - 2 ** (numeric.bits - 1)
        moved = (codes + (middle if kind.kind == "symmetric" else 0)).reshape(-1, kind.values)
        per = numeric.group // kind.values
        scale, offset = (
            None if part is None else part.repeat_interleave(per, -1).reshape(-1, 1)
            for part in (stored.scale, stored.offset)
        )
        assert scale is not None
        blocks = kind.written(moved.to(torch.uint8), scale, offset)
        if (
            torch.equal(kind.codes(blocks).to(moved.dtype), moved)
            and torch.equal(kind.scales(blocks).float(), scale.float())
            and (
                offset is None
                or (
                    kind.offsets is not None
                    and torch.equal(kind.offsets(blocks).float(), offset.float())
                )
            )
        ):
            return number, blocks.reshape(rows, -1)
    return None
