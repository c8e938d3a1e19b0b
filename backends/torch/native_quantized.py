"""The kernels for weights of few bits as torch ops, as those of `native` are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir import InputError
from ...ir.ops.numerics import entries_for
from ...ir.ops.operands import Operands
from ...ir.ops.quantized import check_span, half_or_float
from .. import tiles
from ..cached_library import SHARED
from .native import F32, Kernel, native_op

product_kernel = Kernel("product", SHARED)
quantized_experts_kernel = Kernel("quantized_experts", SHARED)
quantized_embedding_kernel = Kernel("quantized_embedding", SHARED)


def _fit_books(
    given: Operands, name: str, books: Tensor | None, dtype: torch.dtype, entries: int
) -> None:
    """Codebooks of so many entries, or of pairs of 4 bits twice as many; one, or several of whole
    tiles."""
    count, length = tiles.books_of(books)
    bits, group = given.sizes["Q"].bit_length() - 1, given.sizes["K"] // given.sizes["G"]
    given.sizes["E"] = entries_for(given.op, length, bits, group, entries)
    several = books is not None and books.dim() > 1
    given.fit(name, books, "SE" if several else "E", dtype)
    tiles.check_books(count, given.sizes["N"])


def _product(op: str, x: Tensor, *operands: Any) -> Tensor:
    """What a product of rows with a weight in tiles returns. It checks the operands; L is the
    outputs of a tile."""
    packed, scale, offset, book, bias, bits, group, outputs = operands
    rounded, given = op == "quantized_linear", Operands(op)
    given.fit_rows("x", x, "K", F32)
    if outputs < 0:
        raise InputError(f"{op}: there are no {outputs} outputs")
    layout = tiles.Layout(outputs, given.sizes["K"], bits, group)
    given.sizes.update(N=outputs, T=layout.tiles, G=layout.groups, B=layout.group_bytes)
    given.sizes.update(L=tiles.OUTPUTS, Q=1 << bits)
    given.fit("packed", packed, "TGB", torch.uint8)
    given.fit("scale", scale, "TGL", half_or_float(scale))
    given.fit("offset", offset, "TGL", half_or_float(offset))
    given.fit("bias", bias, "N", F32)
    if rounded:
        _fit_books(given, "table", book, torch.int8, tiles.OUTPUTS)
    else:
        _fit_books(given, "codebook", book, F32, 1 << bits)
    if book is not None and offset is not None:
        raise InputError(f"{op}: a {'table' if rounded else 'codebook'} goes with no offset")
    if book is not None and rounded and bits > tiles.MOST_LOOKED_UP:
        raise InputError(
            f"{op}: a table goes with at most {tiles.MOST_LOOKED_UP} bits, got {bits} bits"
        )
    return x.new_empty((*x.shape[:-1], outputs))


def _quantized_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    outputs: int,
    span: int = 0,
) -> Tensor:
    result = _product(
        "quantized_linear", x, packed, scale, offset, table, bias, bits, group, outputs
    )
    check_span("quantized_linear", span, x.shape[-1], group)
    return result


def _float_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    codebook: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    outputs: int,
) -> Tensor:
    return _product("float_linear", x, packed, scale, offset, codebook, bias, bits, group, outputs)


@native_op(_quantized_linear)
def quantized_linear(result: Tensor, *operands: Any) -> None:
    """`graftwork.quantized_linear`, rounded, of rows f32[..., K]: f32[..., N], the weight in tiles.

    packed, scale, offset, table: as `tiles` makes them, scale and offset in float16 or float32,
    their values for bits of the layout; bias f32[N]; outputs: N.
    """
    *given, span = (*operands, 0)[:10]  # torch leaves out what is as usual
    _multiply(True, span, result, *given)


@native_op(_float_linear)
def float_linear(result: Tensor, *operands: Any) -> None:
    """`graftwork.quantized_linear`, not rounded, of rows f32[..., K]: f32[..., N].

    packed, scale, offset, codebook: as `tiles.tiled_table` makes them; bias f32[N]; outputs: N.
    Sums are taken in one order: a row has the same bits whatever is beside it.
    """
    _multiply(False, 0, result, *operands)


def _multiply(rounded: bool, span: int, result: Tensor, *operands: Any) -> None:
    x, packed, scale, offset, book, bias, bits, group, outputs = operands
    sizes = x.shape[:-1].numel(), outputs, x.shape[-1], group, bits
    how = _is_half(scale), _is_half(offset), *tiles.books_of(book)
    tensors = x, packed, scale, offset, book, bias, result
    product_kernel(*tensors, *sizes, *how, rounded, span, torch.get_num_threads())


def _quantized_experts(
    x: Tensor,
    experts: Tensor,
    packed: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    outputs: int,
    rounded: bool,
    span: int = 0,
) -> Tensor:
    given = Operands("quantized_experts")
    given.fit("experts", experts, "NC", torch.int64)
    given.fit("x", x, "NK" if x.dim() == 2 else "NCK", F32)
    if outputs < 1 or not tiles.whole_tiles(outputs):
        raise InputError(f"quantized_experts: experts of {outputs} outputs are no whole tiles")
    if packed.dim() != 3 or packed.shape[0] * tiles.OUTPUTS % outputs:
        raise InputError(
            f"quantized_experts: packed must be tiles of experts of {outputs} outputs, got "
            f"{list(packed.shape)}"
        )
    layout = tiles.Layout(packed.shape[0] * tiles.OUTPUTS, given.sizes["K"], bits, group)
    given.sizes.update(T=layout.tiles, G=layout.groups, B=layout.group_bytes, L=tiles.OUTPUTS)
    given.sizes.update(E=layout.outputs // outputs, R=outputs)
    check_span("quantized_experts", span, given.sizes["K"], group)
    given.fit("packed", packed, "TGB", torch.uint8)
    given.fit("scale", scale, "TGL", half_or_float(scale))
    given.fit("offset", offset, "TGL", half_or_float(offset))
    given.fit("bias", bias, "ER", F32)
    return x.new_empty((*experts.shape, outputs))


@native_op(_quantized_experts)
def quantized_experts(result: Tensor, *given: Any) -> None:
    """`graftwork.quantized_experts` of x f32[N,K] or f32[N,C,K] and experts i64[N,C]: f32[N,C,R].

    packed, scale, offset: as `tiles.tiled_experts` makes them; bias f32[E,R]; outputs: R. Errors:
    `InputError` for an expert that is not in 0..E-1.
    """
    *operands, rounded, span = (*given, 0)[:11]  # as above
    x, experts, packed, scale, offset, bias, bits, group, outputs = operands
    count = packed.shape[0] * tiles.OUTPUTS // outputs
    sizes = *experts.shape, x.dim() == 3, count, outputs, x.shape[-1], group, bits
    how = _is_half(scale), _is_half(offset), rounded, span
    tensors = x, experts, packed, scale, offset, bias, result
    quantized_experts_kernel(*tensors, *sizes, *how, torch.get_num_threads())


def _is_half(tensor: Tensor | None) -> bool:
    return half_or_float(tensor) == torch.float16


def _quantized_embedding(
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    codebook: Tensor | None,
    bits: int,
    group: int,
    outputs: int,
) -> Tensor:
    given = Operands("quantized_embedding")
    if ids.dtype != torch.int64:
        raise InputError(f"quantized_embedding: the kernel takes ids in int64, got {ids.dtype}")
    if outputs < 0:
        raise InputError(f"quantized_embedding: a table cannot have {outputs} rows")
    given.sizes.update(T=-(-outputs // tiles.OUTPUTS), L=tiles.OUTPUTS, Q=1 << bits)
    given.fit("scale", scale, "TGL", half_or_float(scale))
    columns = tiles.check_sizes(bits, group, given.sizes["G"] * max(group, 0))
    given.sizes["B"] = tiles.Layout(outputs, columns, bits, group).group_bytes
    given.fit("packed", packed, "TGB", torch.uint8)
    given.fit("offset", offset, "TGL", half_or_float(offset))
    given.fit("codebook", codebook, "Q", F32)
    if offset is not None and codebook is not None:
        raise InputError("quantized_embedding: a codebook goes with no offset")
    return scale.new_empty((*ids.shape, columns), dtype=F32)


@native_op(_quantized_embedding)
def quantized_embedding(result: Tensor, *operands: Any) -> None:
    """`graftwork.quantized_embedding` of ids i64[...], the table in tiles: f32[..., K].

    packed, scale, offset, codebook: as `tiles.tiled_table` makes them; outputs: rows of the table.
    Errors: `InputError` for an id that is not in 0..outputs-1.
    """
    ids, packed, scale, offset, codebook, bits, group, outputs = operands
    sizes = ids.numel(), outputs, result.shape[-1], group, bits
    halves = _is_half(scale), _is_half(offset)
    tensors = ids, packed, scale, offset, codebook, result
    quantized_embedding_kernel(*tensors, *sizes, *halves, torch.get_num_threads())


LINEAR = torch.ops.graftwork_native.quantized_linear.default
EXPERTS = torch.ops.graftwork_native.quantized_experts.default
FLOAT_LINEAR = torch.ops.graftwork_native.float_linear.default
EMBEDDING = torch.ops.graftwork_native.quantized_embedding.default
"""The ops themselves, for programs."""
