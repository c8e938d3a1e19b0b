"""Weights of few bits as native kernels want them: in tiles of 16 outputs.

A quantized weight is stored as a stream of bits for each output (`graftwork.quantized_linear`),
which says nothing of a processor. Kernels read 16 outputs at a time, so a backend lays weights out
anew, late: when it knows that a kernel of its own will run the product. `kernels/tiles.h` draws the
layout; torch and ONNX Runtime have the same one, and the same kernels.

What is made of a weight u8[N, K*bits/8] with scales [N, K/group], T tiles, G groups:

- `tile_values`: u8[T, G, B], the whole numbers;
- `tile_columns`: [T, G, 16], of scales, and likewise of offsets, in the dtype that they have;
- `tile_table`: i8[16], of a codebook of at most four bits, [32] if values stand in pairs,
  [S, ...] of S codebooks of whole tiles. One of more bits is looked up while the weight is
  packed, which then has eight bits (`kept_bits`), and neither table nor offset.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ..ir import InputError, TensorType, Weight, derivation, derive
from .cached_library import SHARED, library

A = torch.ops.aten
OUTPUTS = 16
"""Outputs of a tile."""

DEPTH = 16
"""Values of K of a block; groups are filled up to a multiple of it."""

BITS = (1, 2, 3, 4, 6, 8)

MOST_LOOKED_UP = 4
"""Bits of whose codebooks a kernel looks values up."""

LARGEST_GROUP = 1 << 16
"""Products of two bytes that add up in 32 bits, whatever they are."""


def kernel_name() -> str:
    """The native kernels, for people: whose, and of which instructions.

    Errors: `UnsupportedError` if there are no kernels.
    """
    made = library(SHARED).processor
    made.restype = ctypes.c_char_p
    return f"graftwork's own ({made().decode()})"


class Layout(NamedTuple):
    """The sizes of a weight [outputs, columns] in tiles. Errors: see `check_sizes`."""

    outputs: int
    columns: int
    bits: int
    group: int

    @property
    def tiles(self) -> int:
        """T."""
        return -(-self.outputs // OUTPUTS)

    @property
    def groups(self) -> int:
        """G."""
        check_sizes(self.bits, self.group, self.columns)
        return self.columns // self.group

    @property
    def group_bytes(self) -> int:
        """B: bytes of a tile's group."""
        return -(-self.group // DEPTH) * DEPTH * OUTPUTS * self.bits // 8


class Tiled(NamedTuple):
    """Weights as kernels take them: what the derivations here make, when it is loaded.

    bits: of `packed`. outputs: N.
    """

    packed: Weight
    scale: Weight
    offset: Weight | None
    table: Weight | None
    bits: int
    group: int
    outputs: int

    @property
    def parts(self) -> tuple[Weight | None, ...]:
        """The operands of a kernel between the rows and the bias."""
        return self.packed, self.scale, self.offset, self.table


def tiled(
    weight: Weight,
    scale: Weight,
    offset: Weight | None,
    codebook: Weight | None,
    *,
    bits: int,
    group: int,
) -> Tiled:
    """A weight of `graftwork.quantized_linear`, as the op has it, in tiles.

    Errors: `InputError` for sizes that kernels do not take, and when it is loaded, for a codebook
    that is not of whole numbers.
    """
    if codebook is None:
        return tiled_table(weight, scale, offset, None, bits=bits, group=group)
    if bits > MOST_LOOKED_UP:
        layout = _layout(weight, bits, group)._replace(bits=kept_bits(bits, codebook))
        name = f"{weight.name}.tiles.{bits}.{group}.{codebook.name}"
        options = {"bits": bits, "group": group}
        packed = derive(name, _sizes(layout), tile_values, weight, codebook, **options)
        return Tiled(
            packed, _by_tile(scale, layout), None, None, layout.bits, group, layout.outputs
        )
    *several, entries = codebook.type.shape
    check_books(several[0] if several else 1, weight.type.shape[0])
    whole = TensorType(torch.int8, (*several, OUTPUTS * max(entries >> bits, 1)))
    made = derive(f"{codebook.name}.table.{bits}", whole, tile_table, codebook, bits=bits)
    return tiled_table(weight, scale, offset, None, bits=bits, group=group)._replace(table=made)


def tiled_table(
    weight: Weight,
    scale: Weight,
    offset: Weight | None,
    codebook: Weight | None,
    *,
    bits: int,
    group: int,
) -> Tiled:
    """A table of `graftwork.quantized_embedding`, as the op has it, in tiles.

    Its codebook may be of any numbers. Of a weight that is multiplied, too, the tiles are the same.

    Errors: `InputError` for sizes that kernels do not take.
    """
    layout = _layout(weight, bits, group)
    if codebook is not None and len(codebook.type.shape) > 1:
        check_books(codebook.type.shape[0], layout.outputs)
    name = f"{weight.name}.tiles.{bits}.{group}"
    packed = derive(name, _sizes(layout), tile_values, weight, bits=bits, group=group)
    moved = None if offset is None else _by_tile(offset, layout)
    return Tiled(packed, _by_tile(scale, layout), moved, codebook, bits, group, layout.outputs)


def tiled_experts(
    weight: Weight, scale: Weight, offset: Weight | None, *, bits: int, group: int
) -> Tiled:
    """A stack of `graftwork.quantized_experts`, as the op has it, in tiles: expert after expert.

    Its outputs are an expert's, which must be whole tiles (see `whole_tiles`). Errors: `InputError`
    for sizes that kernels do not take.
    """
    parts = [None if part is None else _flat(part) for part in (weight, scale, offset)]
    assert parts[0] is not None and parts[1] is not None
    laid = tiled_table(parts[0], parts[1], parts[2], None, bits=bits, group=group)
    return laid._replace(outputs=weight.type.shape[1])


def check_books(count: int, outputs: int) -> None:
    """Errors: `InputError` for several codebooks whose outputs are no whole tiles."""
    if count != 1 and (count < 1 or outputs % (count * OUTPUTS)):
        raise InputError(
            f"native kernels take codebooks of whole tiles of {OUTPUTS} outputs, got {count} of "
            f"{outputs}"
        )


def books_of(codebook: Tensor | None) -> tuple[int, int]:
    """How many codebooks a kernel is given, [L] or [S,L], and how long they are; 0 for none."""
    if codebook is None:
        return 1, 0
    return (codebook.shape[0] if codebook.dim() > 1 else 1), codebook.shape[-1]


def whole_tiles(outputs: int) -> bool:
    """Whether an expert of so many outputs begins where a tile does."""
    return outputs % OUTPUTS == 0


def _flat(part: Weight) -> Weight:
    experts, rows, columns = part.type.shape
    sizes = TensorType(part.type.dtype, (experts * rows, columns))
    return derive(f"{part.name}.rows", sizes, A.flatten.using_ints, part, start_dim=0, end_dim=1)


def _layout(weight: Weight, bits: int, group: int) -> Layout:
    outputs, stored = weight.type.shape
    return Layout(outputs, stored * 8 // bits, bits, group)


def _sizes(layout: Layout) -> TensorType:
    return TensorType(torch.uint8, (layout.tiles, layout.groups, layout.group_bytes))


def _by_tile(scale: Weight, layout: Layout) -> Weight:
    sizes = TensorType(scale.type.dtype, (layout.tiles, layout.groups, OUTPUTS))
    return derive(f"{scale.name}.columns", sizes, tile_columns, scale)


def check_sizes(bits: int, group: int, columns: int) -> int:
    """The columns, if kernels take so many in groups of this size. Errors: `InputError`."""
    if bits not in BITS:
        raise InputError(f"native kernels take weights of {BITS} bits, got {bits}")
    if not 1 <= group <= LARGEST_GROUP or columns < 1 or columns % group:
        raise InputError(
            f"native kernels take groups of 1 to {LARGEST_GROUP} values into which the columns can "
            f"be divided, got {columns} columns in groups of {group}"
        )
    return columns


def kept_bits(bits: int, codebook: object) -> int:
    """Bits of a packed weight; codebook: None if it has none."""
    return bits if codebook is None or bits <= MOST_LOOKED_UP else 8


@derivation
def tile_values(weight: Tensor, codebook: Tensor | None = None, *, bits: int, group: int) -> Tensor:
    """A weight u8[N, K*bits/8] as tiles u8[T, G, B], of `kept_bits`; codebook f32[2^bits].

    Errors: `InputError` for sizes that do not fit, or a codebook that is not of whole numbers in
    -127..127; `UnsupportedError` if there are no kernels.
    """
    columns = weight.shape[-1] * 8 // bits if bits in BITS and weight.dim() == 2 else 0
    check_sizes(bits, group, columns)
    if weight.dtype != torch.uint8 or columns * bits != weight.shape[1] * 8:
        raise InputError(
            f"a weight of {bits} bits must be u8[N, K*{bits}/8], got "
            f"{weight.dtype}{list(weight.shape)}"
        )
    rows = weight.detach().cpu().contiguous()
    kept = kept_bits(bits, codebook)
    layout = Layout(len(rows), columns, kept, group)
    # Kernels are fastest with vectors that begin where the processor's lines do; torch's do.
    packed = torch.empty(layout.tiles, layout.groups, layout.group_bytes, dtype=torch.uint8)
    values = None
    if codebook is not None and bits > MOST_LOOKED_UP:
        values = (_whole(codebook, bits).to(torch.int16) + 128).to(torch.uint8)
    sizes = (len(rows), columns, group, bits, torch.get_num_threads())
    library(SHARED).pack_tiles(
        *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in (rows, values, packed)),
        *map(ctypes.c_int64, sizes),
    )
    return packed


@derivation
def tile_columns(scale: Tensor) -> Tensor:
    """Scales, or offsets, [N, G] as [T, G, 16], zeros for outputs that are missing."""
    outputs, groups = scale.shape
    tiles = -(-outputs // OUTPUTS)
    filled = scale.new_zeros(tiles * OUTPUTS, groups)
    filled[:outputs] = scale
    return filled.view(tiles, OUTPUTS, groups).mT.contiguous()


@derivation
def tile_table(codebook: Tensor, *, bits: int) -> Tensor:
    """A codebook f32[2^bits] of at most four bits as a table i8[16], one of pairs f32[32] as
    i8[32], S of them f32[S,L] as i8[S,...].

    Errors: `InputError` for more bits, or if it is not of whole numbers in -127..127.
    """
    if bits > MOST_LOOKED_UP:
        raise InputError(f"a codebook of {bits} bits has no table: packed weights are its values")
    whole = _whole(codebook, bits)
    if whole.shape[-1] > OUTPUTS:
        return whole
    found = whole.new_zeros(*whole.shape[:-1], OUTPUTS)
    found[..., : 1 << bits] = whole
    return found


def _whole(codebook: Tensor, bits: int) -> Tensor:
    """Codebooks as i8 of the same shape."""
    wide = codebook.detach().cpu().double()
    pairs = bits == MOST_LOOKED_UP and wide.shape[-1:] == (2 << bits,)
    if wide.dim() not in (1, 2) or not (pairs or wide.shape[-1] == 1 << bits):
        raise InputError(
            f"a codebook of {bits} bits has {1 << bits} values, got {list(wide.shape)}"
        )
    if not bool(((wide == wide.round()) & (wide.abs() <= 127)).all()):
        raise InputError(
            "a codebook for rounded activations must be of whole numbers in -127..127, got "
            f"{codebook.tolist()}"
        )
    return wide.to(torch.int8)
