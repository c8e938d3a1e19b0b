"""One tensor of a GGUF file as a weight: floats, or blocks in their bits, read when loaded.

Rows may be kept in another order than transformers' (`LAYOUTS`): they are put in order as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
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

Order = tuple[str, tuple[int, ...]]
"""A layout of rows and its sizes, see `LAYOUTS`."""

AS_IT_IS: Order = ("", ())


def _pairs(rows: int, heads: int) -> torch.Tensor:
    """The file has rows 2i and 2i+1 of a head side by side, transformers i and i + half."""
    return torch.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


def _grouped(rows: int, groups: int, each: int, dim: int) -> torch.Tensor:
    """The file has all queries, all keys and all values, transformers those of one group of heads
    after the other. each: queries of a group. dim: rows of a head."""
    queries, keys, values = torch.arange(rows).split(
        [groups * each * dim, groups * dim, groups * dim]
    )
    parts = [queries.reshape(groups, each * dim), keys.reshape(groups, dim)]
    return torch.cat([*parts, values.reshape(groups, dim)], 1).flatten()


LAYOUTS: dict[str, Callable[..., torch.Tensor]] = {"pairs": _pairs, "grouped": _grouped}
"""Orders of rows: for so many of them and the layout's sizes, which row of the file goes where."""


def check_order(file: GgufFile, entry: Entry, layout: str, sizes: tuple[int, ...]) -> None:
    """Errors: `InputError` for rows that cannot be in such an order."""
    rows = entry.dims[0]
    if layout == "pairs":
        fine = sizes[0] >= 1 and rows % (2 * sizes[0]) == 0
    else:
        groups, each, dim = sizes
        fine = rows == groups * (each + 2) * dim
    if not fine:
        of = " x ".join(map(str, sizes))
        raise InputError(
            f"{file.path}: tensor {entry.name} has {rows} rows, which are no {layout} of {of}"
        )


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


def rows_of(file: GgufFile, entry: Entry, order: Order = AS_IT_IS) -> Weight:
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
        layout=order[0],
        sizes=order[1],
    )


@derivation
def block_rows(
    *, file: GgufFile, entry: Entry, width: int, layout: str, sizes: tuple[int, ...]
) -> torch.Tensor:
    """The bytes u8[R,width] of a tensor's rows, in the order that a layout says (see `LAYOUTS`)."""
    rows = file.rows(entry, width)
    return rows[LAYOUTS[layout](len(rows), *sizes)] if layout else rows


def floats_of(file: GgufFile, entry: Entry, order: Order = AS_IT_IS) -> Weight:
    """A tensor of floats, its rows in an order."""
    dtype, raw = FLOATS[entry.kind], rows_of(file, entry, order)
    type = TensorType(dtype, entry.dims)
    return derive(entry.name, type, bytes_as, raw, dtype=dtype, dims=entry.dims)


@derivation
def bytes_as(rows: torch.Tensor, *, dtype: torch.dtype, dims: tuple[int, ...]) -> torch.Tensor:
    """Bytes u8[R,W] as the numbers that they are."""
    return rows.view(dtype).reshape(dims)


def stored_blocks(
    file: GgufFile, entry: Entry, kind: BlockType, order: Order = AS_IT_IS
) -> StoredWeight:
    """A tensor of blocks, its rows in an order, decoded part by part when they are loaded."""
    *stack, rows, columns = entry.dims
    numeric = kind.numeric
    packed, scale = (
        TensorType(type.dtype, (*stack, *type.dims)) for type in numeric.types(rows, columns)
    )
    held, options = file.owner(entry.name), {"layout": order[0], "sizes": order[1]}
    width = width_of(file, entry)

    def part(name: str, type: TensorType, what: str) -> Weight:
        given: dict[str, Any] = {"file": held, "entry": entry, "width": width, **options}
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
def block_part(
    *, file: GgufFile, entry: Entry, width: int, layout: str, sizes: tuple[int, ...], part: str
) -> torch.Tensor:
    """The scales, offsets or codes [...,R,W] of a tensor's blocks; codes are packed. layout, sizes:
    as in `block_rows`."""
    type, whole, done = TYPES[entry.kind], torch.empty(0), 0
    total = prod(entry.dims[:-1])
    for blocks in file.pieces(entry, width, max(1, AT_ONCE // width)):
        found: torch.Tensor = getattr(type, part)(blocks.reshape(-1, type.size))
        rows = found.reshape(len(blocks), -1)
        rows = pack(rows, type.bits) if part == "codes" else rows
        whole = whole if done else rows.new_empty(total, rows.shape[1])
        whole[done : done + len(rows)] = rows
        done += len(rows)
    ordered = whole[LAYOUTS[layout](total, *sizes)] if layout else whole
    return ordered.reshape(*entry.dims[:-1], -1)


def stored_in_eight(file: GgufFile, entry: Entry, raw: Weight) -> StoredWeight:
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
        raw,
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
