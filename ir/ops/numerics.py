"""Storage of quantized weights: bit layout, scales, codebooks.

A row of K values is a dense little-endian bitstream of K unsigned integers of `bits` bits; each
`group` of them shares a scale. Bits are 1, 2, 3, 4, 6 or 8. Read as int32, it is the layout of
compressed-tensors' `pack_to_int32`.

Codebooks map values to floats: f32[L], or f32[S,L] with one for each run of N/S outputs. L is
2^bits, or twice that for values in pairs (2k, 2k+1): beside a value `mark(bits)`, an outlier is
looked up in the second half (Guo et al., "OliVe" (2023)).

    >>> packed = pack(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]]), 3)
    >>> packed.tolist(), unpack(packed, 3).tolist()
    ([[209, 88, 31]], [[1, 2, 3, 4, 5, 6, 7, 0]])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..support.errors import InputError
from ..types import DTYPE_NAMES, TensorType
from ..weights import derivation, option

WIDTHS = (1, 2, 3, 4, 6, 8)
"""Allowed bits of a stored value."""

SCALES = (torch.float32, torch.float16)
"""Allowed dtypes of scales and offsets."""

LOOKED_UP = 4
"""Maximum bits of values in pairs, or with several codebooks."""

KINDS: dict[str, tuple[tuple[str, ...], int]] = {
    "symmetric": ((), 0),
    "affine": (("offset",), 0),
    "codebook": (("codebook",), 1),
    "pairs": (("codebook",), 2),
}
"""By kind: further parts of a weight, and entries of its codebooks in multiples of 2^bits."""

AT_ONCE = 1 << 18
"""Values quantized at a time on the CPU, so that intermediate values fit its caches."""


class Quantized(NamedTuple):
    """A stored weight [N,K]: weight u8[N,K*bits/8]; scale and offset [N,K/group], offset for affine
    weights only; codebook f32[L] or f32[S,L] if the weight has its own."""

    weight: Tensor
    scale: Tensor
    offset: Tensor | None = None
    codebook: Tensor | None = None


PARTS = Quantized._fields
"""Parts of a stored weight, named like the operands of ops."""


@option
@dataclass(frozen=True)
class Numeric:
    """The format of a weight [N,K].

    bits: of a stored value q in 0..2^bits-1. group: values along K that share a scale. kind: the
    value of q: scale * (q - 2^(bits-1)) if symmetric, scale * q + offset if affine,
    scale * codebook[q] with a codebook, or pairs. scale: dtype of scales and offsets. books: number
    of codebooks. Errors: `InputError`.
    """

    bits: int
    group: int
    kind: str = "symmetric"
    scale: torch.dtype = torch.float32
    books: int = 1

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.group < 1:
            raise InputError(f"group: expected at least 1 value, got {self.group}")
        if self.kind not in KINDS:
            raise InputError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind}")
        if self.scale not in SCALES:
            raise InputError(f"scale: expected torch.float32 or torch.float16, got {self.scale}")
        if self.kind == "symmetric" and self.bits == 1:
            raise InputError("1 bit has no middle: store it as affine")
        if self.kind == "pairs" and (self.bits != LOOKED_UP or self.group % 2):
            raise InputError(
                f"pairs: expected {LOOKED_UP} bits and groups of pairs, got {self.bits} bits and a "
                f"group of {self.group}"
            )
        if self.books < 1 or (self.books > 1 and not (self.entries and self.bits <= LOOKED_UP)):
            raise InputError(
                f"books: expected 1, or with a codebook of at most {LOOKED_UP} bits more, got "
                f"{self.books} for {self.bits} bits, {self.kind}"
            )

    @property
    def entries(self) -> int:
        """Entries L of a codebook; 0 without one."""
        _, several = KINDS[self.kind]
        return several << self.bits

    @property
    def parts(self) -> tuple[str, ...]:
        """Fields of `Quantized` for a weight with its own codebooks."""
        return ("weight", "scale", *KINDS[self.kind][0])

    @property
    def brief(self) -> str:
        """Short description.

        >>> Numeric(4, 32, "affine", torch.float16).brief
        '4 bits, affine, f16 scales of 32'
        """
        return f"{self.bits} bits, {self.kind}, {DTYPE_NAMES[self.scale]} scales of {self.group}"

    def refusal(self, columns: int) -> str:
        """Why rows of this many columns cannot be stored; "" if they can."""
        if columns % self.group:
            fitting = [g for g in (128, 64, 32, 16) if columns % g == 0 and g != self.group]
            how = f"a group of {fitting[0]}" if fitting else f"one group a row ({columns})"
            return (
                f"its {columns} columns are no multiple of the group of {self.group}: choose "
                f"{how}, or exclude the weight"
            )
        if columns * self.bits % 8:
            return (
                f"{columns} columns of {self.bits} bits fill no whole bytes: choose 8 bits, or "
                f"exclude the weight"
            )
        return ""

    def types(self, rows: int, columns: int) -> tuple[TensorType, TensorType]:
        """Types of the stored weight and of its scales and offsets. Errors: `InputError`."""
        if why := self.refusal(columns):
            raise InputError(f"a weight of {rows} rows: {why}")
        packed = TensorType(torch.uint8, (rows, columns * self.bits // 8))
        return packed, TensorType(self.scale, (rows, columns // self.group))

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a stored weight with scales, offsets and codebooks.

        >>> Numeric(4, 32, "affine", torch.float16).nbytes(1024, 1024) * 8 / 1024**2
        5.0
        """
        packed, scale = self.types(rows, columns)
        scales = 2 if "offset" in self.parts else 1
        book = 4 * self.entries * self.books
        return packed.nbytes + scales * scale.nbytes + book

    def quantize(self, weight: Tensor, codebook: Tensor | None = None) -> Quantized:
        """Quantize a floating weight [N,K], rounding to nearest, half to even.

        Symmetric: a group's largest magnitude becomes 2^(bits-1) - 1 steps. Affine: its minimum and
        maximum become 0 and 2^bits - 1. Codebook f32[2^bits]: its largest magnitude becomes the
        codebook's. Scales are rounded to their dtype before use. Errors: `InputError` for columns
        that do not fit, or scales that overflow their dtype.
        """
        types = self.types(*weight.shape)
        packed, scale = (torch.empty(t.shape, dtype=t.dtype, device=weight.device) for t in types)
        moved = "offset" in self.parts and codebook is None
        whole = Quantized(packed, scale, torch.empty_like(scale) if moved else None)
        rows = max(1, AT_ONCE // weight.shape[1] if weight.is_cpu else len(weight))
        # Into their place at once: kept between temporary values they would scatter the heap.
        for first in range(0, len(weight), rows):
            found = self._quantized(weight[first : first + rows], codebook)
            for all_rows, part in zip(whole, found, strict=True):
                if all_rows is not None and part is not None:
                    all_rows[first : first + rows] = part
        return whole

    def _quantized(self, weight: Tensor, codebook: Tensor | None) -> Quantized:
        rows, columns = weight.shape
        grouped = weight.float().reshape(rows, columns // self.group, self.group)
        if codebook is not None:
            scale = self._scale(grouped.abs().amax(-1) / codebook.abs().max())
            places = nearest(grouped / _last(scale), codebook).to(torch.uint8)
            return Quantized(pack(places.reshape(rows, columns), self.bits), scale)
        scale, offset = self.scales(grouped)
        steps = self.steps(grouped, _last(scale), None if offset is None else _last(offset))
        return Quantized(
            pack(steps.reshape(rows, columns).to(torch.uint8), self.bits), scale, offset
        )

    def scales(self, grouped: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and offsets [...] that `quantize` uses for groups f32[...,group]; not for
        codebooks."""
        if "offset" in self.parts:
            low, high = grouped.amin(-1), grouped.amax(-1)
            offset = self.stored(low)
            return self._scale((high - offset.float()) / (2**self.bits - 1)), offset
        return self._scale(grouped.abs().amax(-1) / (2 ** (self.bits - 1) - 1)), None

    def steps(self, values: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The nearest stored values, f32 integers in 0..2^bits-1."""
        moved = values if offset is None else values - offset.float()
        steps = (moved / scale.float()).round_()
        if offset is None:
            steps += 2 ** (self.bits - 1)
        return steps.clamp_(0, 2**self.bits - 1)

    def values(self, steps: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """Dequantized values; the reverse of `steps`; not for codebooks."""
        middle = 2 ** (self.bits - 1) if offset is None else 0
        found: Tensor = (steps - middle) * scale.float()
        return found if offset is None else found + offset.float()

    def _scale(self, scale: Tensor) -> Tensor:
        """Scales in their dtype; 1 for groups of zeros."""
        stored = self.stored(scale)
        return torch.where(stored > 0, stored, torch.ones_like(stored))

    def stored(self, values: Tensor) -> Tensor:
        """Scales or offsets in their dtype. Errors: `InputError` for overflow."""
        stored = values.to(self.scale)
        if torch.isinf(stored).any():
            raise InputError(
                f"{DTYPE_NAMES[self.scale]} cannot hold the scale or offset {values.abs().max()}: "
                f"store them as f32"
            )
        return stored

    def dequantize(self, stored: Quantized, codebook: Tensor | None = None) -> Tensor:
        """The values f32[N,K] of a stored weight."""
        book = stored.codebook if codebook is None else codebook
        return dequantize(*stored[:3], book, bits=self.bits)


def check_bits(bits: int) -> None:
    """Errors: `InputError` for other bits than `WIDTHS`."""
    if bits not in WIDTHS:
        raise InputError(f"bits: expected one of {', '.join(map(str, WIDTHS))}, got {bits}")


def dequantize(
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    codebook: Tensor | None = None,
    *,
    bits: int,
) -> Tensor:
    """The values f32[...,K] of a stored weight: weight u8[...,K*bits/8], scale and offset
    [...,K/group], codebook f32[L] or f32[S,L]."""
    values = levels(weight, offset, codebook, bits=bits)
    grouped = values.reshape(*scale.shape, -1) * _last(scale.float())
    grouped = grouped if offset is None else grouped + _last(offset.float())
    return grouped.reshape(values.shape)


@derivation
def stored_floats(
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    codebook: Tensor | None = None,
    order: Tensor | None = None,
    *,
    bits: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """As `dequantize`, in a dtype. order: i64[K], the column that each stored column belongs to."""
    values = dequantize(weight, scale, offset, codebook, bits=bits).to(dtype)
    return values if order is None else values[..., order.argsort()]


def levels(weight: Tensor, offset: Tensor | None, codebook: Tensor | None, *, bits: int) -> Tensor:
    """Unscaled values f32[...,K]: codebook entries, q with an offset, or q - 2^(bits-1)."""
    values = unpack(weight, bits)
    if codebook is not None:
        return looked_up(values, codebook, bits)
    return (values if offset is not None else values - 2 ** (bits - 1)).float()


def entries_for(op: str, length: int, bits: int, group: int, unit: int = 0) -> int:
    """Expected entries of a codebook that has `length`: `unit` (0: 2^bits), or twice as many for
    values in pairs. Errors: `InputError` for bits or groups that have no pairs."""
    unit = unit or 2**bits
    if length != 2 * unit:
        return unit
    if bits != LOOKED_UP or group % 2:
        raise InputError(
            f"{op}: values in pairs have {LOOKED_UP} bits and groups of an even number, got {bits} "
            f"bits and a group of {group}"
        )
    return length


def mark(bits: int) -> int:
    """The code beside an outlier in a pair (see the module docstring): negative zero."""
    return int(2 ** (bits - 1))


def looked_up(values: Tensor, codebook: Tensor, bits: int) -> Tensor:
    """Codebook entries f32[...,K] of values i32[...,K]. f32[S,L]: each codebook serves a run of the
    rows [N,K]."""
    places = values.long()
    if codebook.shape[-1] == 2 * 2**bits:
        beside = places.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        places = places + 2**bits * (beside == mark(bits))
    if codebook.dim() == 1:
        return codebook.float()[places]
    runs = places.unflatten(0, (len(codebook), -1)).flatten(1)
    return codebook.float().gather(1, runs).view(places.shape)


def nearest(values: Tensor, codebook: Tensor) -> Tensor:
    """Indices (float32) of the nearest codebook entries; ties to the smaller entry."""
    order = codebook.argsort(stable=True)
    known = codebook[order].float()
    bounds = (known[1:] + known[:-1]) / 2
    return order[torch.bucketize(values, bounds)].float()


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack integers [...,K] in 0..2^bits-1 into a bitstream u8[...,K*bits/8]. Errors: `InputError`
    if they do not fill whole bytes."""
    several, size = _unit(bits)
    if values.shape[-1] * bits % 8:
        raise InputError(f"{values.shape[-1]} values of {bits} bits fill no whole bytes")
    if several == size:
        return values.to(torch.uint8)
    if size == 1:  # a byte's values as one whole number, which is faster than each by itself
        wide = {2: torch.int16, 4: torch.int32, 8: torch.int64}[several]
        units = values.to(torch.uint8).clone(memory_format=torch.contiguous_format).view(wide)
        byte = units
        for place in range(1, several):
            byte = byte | units >> (8 - bits) * place
        return byte.to(torch.uint8)
    units = values.to(torch.int32).unflatten(-1, (-1, several))
    word: Tensor = units[..., 0]
    for place in range(1, several):
        word = word + units[..., place] * 2 ** (bits * place)
    made = [word // 256**place % 256 for place in range(size)]
    return torch.stack(made, -1).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack a bitstream u8[...,K*bits/8] to i32[...,K]."""
    several, size = _unit(bits)
    if several == size:
        return packed.to(torch.int32)
    units = packed.to(torch.int32).unflatten(-1, (-1, size))
    word = units[..., 0]
    for place in range(1, size):
        word = word + units[..., place] * 256**place
    found = [word // 2 ** (bits * place) % 2**bits for place in range(several)]
    return torch.stack(found, -1).flatten(-2)


def _unit(bits: int) -> tuple[int, int]:
    """The smallest number of values that fill whole bytes, and the number of bytes (<= 3)."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _last(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(-1)
