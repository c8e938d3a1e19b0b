"""One tensor of a GGUF file as a weight: floats, or blocks in their bits, read when loaded."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from ...ir import InputError, TensorType, UnsupportedError, Weight, derivation, derive
from ...ir.ops.numerics import pack
from ...ir.support.names import shown
from ...ir.weights import derivation_of_parts
from ..stored_weights import StoredWeight
from .blocks import EIGHT, FLOATS, TYPES, BlockType
from .reader import Entry, GgufFile


def width_of(file: GgufFile, entry: Entry) -> int:
    """Bytes of a row of a tensor. Errors: `InputError` for parts of blocks, `UnsupportedError` for
    types that not even the package knows."""
    columns = entry.dims[-1]
    if entry.kind in FLOATS:
        return columns * FLOATS[entry.kind].itemsize
    values, size = _block(file, entry)
    if columns % values:
        raise InputError(
            f"{file.path}: tensor {shown(entry.name)} has the size {list(entry.dims)}; its type "
            f"{entry.kind} has rows of blocks of {values} values"
        )
    return columns // values * size


def _block(file: GgufFile, entry: Entry) -> tuple[int, int]:
    """Values and bytes of a block of a tensor's type."""
    if (kind := TYPES.get(entry.kind)) is not None:
        return kind.values, kind.size
    import gguf

    try:
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(entry.kind)]
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"{file.path}: tensor {shown(entry.name)} has the block type {entry.kind}, which the "
            f"package gguf does not know"
        ) from error
    return int(values), int(size)


def rows_of(file: GgufFile, entry: Entry) -> Weight:
    """The bytes of a tensor's rows u8[R,W]; a vector's rows are its values."""
    held = entry
    if len(entry.dims) == 1 and entry.kind in FLOATS:
        held = Entry(entry.name, (*entry.dims, 1), entry.kind, entry.start)
    width = width_of(file, held)
    type = TensorType(torch.uint8, (prod(held.dims[:-1]), width))
    return derive(
        entry.name,
        type,
        block_rows,
        file=file.owner(entry.name),
        entry=held,
        width=width,
    )


@derivation
def block_rows(*, file: GgufFile, entry: Entry, width: int) -> torch.Tensor:
    """The bytes u8[R,width] of a tensor's rows."""
    return file.rows(entry, width)


def floats_of(file: GgufFile, entry: Entry) -> Weight:
    """A tensor of floats."""
    dtype, raw = FLOATS[entry.kind], rows_of(file, entry)
    type = TensorType(dtype, entry.dims)
    return derive(entry.name, type, bytes_as, raw, dtype=dtype, dims=entry.dims)


@derivation
def bytes_as(rows: torch.Tensor, *, dtype: torch.dtype, dims: tuple[int, ...]) -> torch.Tensor:
    """Bytes u8[R,W] as the numbers that they are."""
    return rows.view(dtype).reshape(dims)


def stored_blocks(file: GgufFile, entry: Entry, kind: BlockType) -> StoredWeight:
    """A tensor of blocks, decoded part by part when they are loaded."""
    *stack, rows, columns = entry.dims
    numeric = kind.numeric
    packed, scale = (
        TensorType(type.dtype, (*stack, *type.dims)) for type in numeric.types(rows, columns)
    )
    given: dict[str, Any] = {
        "file": file.owner(entry.name),
        "entry": entry,
        "width": width_of(file, entry),
    }

    def part(name: str, type: TensorType, what: str) -> Weight:
        return derive(f"{entry.name}.{name}", type, block_part, part=what, **given)

    scales = part("scale", scale, "scales")
    offsets = None if kind.offsets is None else part("offset", scale, "offsets")
    for small in filter(None, (scales, offsets)):
        if not torch.isfinite(small.load().float()).all():
            raise InputError(f"{file.path}: tensor {entry.name} has scales that are not finite")
    book = torch.tensor(kind.codebook, dtype=torch.float32) if kind.codebook else None
    return StoredWeight(
        numeric,
        part("bits", packed, "codes"),
        scales,
        offsets,
        None if book is None else Weight.of(f"{kind.name}.codebook", book),
    )


AT_ONCE = 1 << 23
"""Bytes of blocks that are decoded at a time: not all are in memory beside what they give."""


@derivation
def block_part(*, file: GgufFile, entry: Entry, width: int, part: str) -> torch.Tensor:
    """The scales, offsets or codes [...,R,W] of a tensor's blocks; codes are packed."""
    type, whole, done = TYPES[entry.kind], torch.empty(0), 0
    total = prod(entry.dims[:-1])
    for blocks in file.pieces(entry, width, max(1, AT_ONCE // width)):
        found: torch.Tensor = getattr(type, part)(blocks.reshape(-1, type.size))
        rows = found.reshape(len(blocks), -1)
        rows = pack(rows, type.bits) if part == "codes" else rows
        whole = whole if done else rows.new_empty(total, rows.shape[1])
        whole[done : done + len(rows)] = rows
        done += len(rows)
    return whole.reshape(*entry.dims[:-1], -1)


def stored_in_eight(file: GgufFile, entry: Entry) -> StoredWeight:
    """A tensor of another type, rounded to 8 bits. Errors: `UnsupportedError` for a type that the
    package cannot unpack."""
    import gguf

    kind = gguf.GGMLQuantizationType(entry.kind)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{file.path}: tensor {shown(entry.name)} has the block type {kind.name}, which the "
            f"package gguf cannot unpack"
        ) from error
    *stack, rows, columns = entry.dims
    floats = derive(
        entry.name,
        TensorType(torch.float32, entry.dims),
        dequantized_blocks,
        rows_of(file, entry),
        kind=entry.kind,
        dims=entry.dims,
    )
    packed, scale = (
        derive(
            f"{entry.name}.{part}",
            TensorType(type.dtype, (*stack, *type.dims)),
            eight_bits,
            floats,
            part=part,
        )
        for part, type in zip(("weight", "scale"), EIGHT.types(rows, columns), strict=True)
    )
    return StoredWeight(EIGHT, packed, scale)


@derivation_of_parts("part")
def eight_bits(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The codes and scales of values f32[...,N,K] in the form `EIGHT`."""
    stored = EIGHT.quantize(values.reshape(-1, values.shape[-1]))
    found = {"weight": stored.weight, "scale": stored.scale}
    return {name: part.reshape(*values.shape[:-1], -1) for name, part in found.items()}


@derivation
def dequantized_blocks(rows: torch.Tensor, *, kind: int, dims: tuple[int, ...]) -> torch.Tensor:
    """What rows of blocks u8[R,W] stand for, by the package."""
    import gguf

    values = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(values).reshape(dims)
