"""Rows of products with weights of a few bits.

graftwork's own kernels run them where a session may have any (see `rows_tiles`): with activations
rounded that is the op's meaning bit for bit, and fastest. In models for others, and where there is
no compiler, kernels of ONNX Runtime do.

Eight bits with one scale a row are a product of bytes (see `byte_products`), which is the meaning
but for the order of its factors. What else MatMulNBits takes, it multiplies; everything else is a
float product with the weight's values, worked out when the model is stored. Rounded activations:
MatMulNBits rounds them to int8 by row and block of the weight. That is the op's meaning where runs
of a row are as long as a block; else the two differ by what rounding costs. Sums are exact in both.
A row must have the same bits whatever is beside it, and not every block size of the kernel sees to
that: the largest that does is used, with scales repeated (see `probe`). The kernel is slow with
zero points that are not whole, so offsets are a float product of their own, with the sums of each
group's activations; that, and float products of rounded rows, take a lone row twice.

CUDA's MatMulNBits multiplies activations as they are, in the program's own dtype: what is rounded
on the CPU for the sake of its kernels is not rounded there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as oir
import torch
import torch.fx

from ...ir import Dim, TensorType, UnsupportedError, Weight, derivation, derive
from ...ir.execution.executable import DECOMPOSED
from ...ir.ops.numerics import dequantize, looked_up, pack, unpack
from ...ir.rewrite.stored import are_weights
from .. import tiles
from ..cuda_blocks import cuda_layout
from . import rows_tiles
from .byte_products import ZERO, byte_product, quantized_rows
from .emit import Emitter, row, stored_parts, type_of
from .pairs import Pairs
from .probe import quantized_ops_available, rows_of_few_bits_are_exact

G = torch.ops.graftwork
F32, U8 = torch.float32, torch.uint8
BLOCKS = (256, 128, 64, 32, 16)
"""Values that share a scale in MatMulNBits."""

ROUNDED, FLOAT = (2, 4, 8), (4,)
"""Bits for which MatMulNBits is fast, with rounded activations and with float ones."""

INT8 = 4
"""The accuracy level at which MatMulNBits rounds activations to int8; at 1 they are float32."""


@dataclass(frozen=True)
class _Stored:
    """A stored weight [N,K], its scales, and what it has besides."""

    weight: Weight
    scale: Weight
    offset: Weight | None
    codebook: Weight | None
    bits: int
    group: int

    @property
    def rows(self) -> int:
        return int(str(self.scale.type.dims[0]))

    @property
    def groups(self) -> int:
        return int(str(self.scale.type.dims[1]))

    @property
    def is_bytes_by_row(self) -> bool:
        """Whether values are bytes around 128 with one scale a row, and no more."""
        return self.bits == 8 and self.groups == 1 and self.offset is None and self.codebook is None

    def derived(
        self, name: str, dims: Sequence[Dim], dtype: torch.dtype, make: Any, /, **options: Any
    ) -> Weight:
        """A weight that `make` makes of the parts."""
        parts = self.weight, self.scale, self.offset, self.codebook
        type = TensorType(dtype, tuple(dims))
        return derive(f"{self.weight.name}.{name}", type, make, *parts, bits=self.bits, **options)

    def values(self) -> Weight:
        """The weight's values f32[K,N]."""
        dims = self.groups * self.group, self.rows
        return self.derived("values.kn", dims, F32, values_across)

    def blocked(self, bits: int, block: int) -> Weight:
        """The stored values u8[N,K/block,block*bits/8], around 2^(bits-1) in the middle."""
        dims = (self.rows, self.groups * self.group // block, block * bits // 8)
        return self.derived(f"{bits}x{block}", dims, U8, block_values, to=bits, dims=dims)

    def scales(self, block: int, dtype: torch.dtype = F32) -> Weight:
        """Scales [N,K/block] of a dtype."""
        times = self.group // block
        type = TensorType(dtype, (self.rows, self.groups * times))
        suffix = "" if dtype == F32 else f".{str(dtype).removeprefix('torch.')}"
        name = f"{self.scale.name}.x{block}{suffix}"
        return derive(name, type, block_scales, self.scale, times=times, dtype=dtype)

    def across(self, bits: int) -> Weight:
        """The stored values as unsigned numbers of 4 or 8 bits, in the order [K,N]: u8[K,N], or two
        a byte u8[K*N/2]."""
        columns = self.groups * self.group
        dims = (columns, self.rows) if bits == 8 else (columns * self.rows // 2,)
        name, type = f"{self.weight.name}.{bits}.kn", TensorType(U8, dims)
        options = {"bits": self.bits, "to": bits, "dims": dims}
        return derive(name, type, codes_across, self.weight, **options)

    def scales_across(self) -> Weight:
        """Scales f32[K/group,N]."""
        type = TensorType(F32, (self.groups, self.rows))
        return derive(f"{self.scale.name}.gn", type, wide_across, self.scale, dims=type.shape)

    def offsets_across(self) -> Weight:
        """Offsets f32[K/group,1,N]."""
        assert self.offset is not None
        type = TensorType(F32, (self.groups, 1, self.rows))
        return derive(f"{self.offset.name}.gn", type, wide_across, self.offset, dims=type.shape)

    def whole_zeros(self, bits: int) -> Weight | None:
        """Zero points of 4 or 8 bits in the order [K/group,N], packed as `across` packs; None if
        offsets are no whole steps."""
        dims = (self.groups, self.rows) if bits == 8 else (self.groups * self.rows // 2,)
        type, name = TensorType(U8, dims), f"{self.weight.name}.{bits}.zeros"
        if self.offset is None:
            count, middle = self.groups * self.rows, 2 ** (self.bits - 1)
            options = {"count": count, "middle": middle, "bits": bits, "dims": dims}
            return derive(name, type, middle_zeros, **options)
        scale, offset = self.scale.load(), self.offset.load()
        zeros = _zeros(scale, offset)
        whole = bool(((-scale.float() * zeros).to(offset.dtype) == offset).all())
        if not whole or zeros.min() < 0 or zeros.max() >= 2**bits:
            return None
        return derive(name, type, packed_zeros, self.scale, self.offset, bits=bits, dims=dims)

    def shifts(self) -> Weight:
        """What the sum of a group's activations counts f32[K/group,N], besides the values around
        the middle."""
        assert self.offset is not None
        type, middle = TensorType(F32, (self.groups, self.rows)), 2 ** (self.bits - 1)
        name = f"{self.offset.name}.shift"
        return derive(name, type, shifts_across, self.scale, self.offset, middle=middle)


@derivation
def values_across(*parts: torch.Tensor, bits: int) -> torch.Tensor:
    """The values f32[K,N] of a weight by its parts."""
    return dequantize(*parts, bits=bits).T


@derivation
def block_values(
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    codebook: torch.Tensor | None,
    *,
    bits: int,
    to: int,
    dims: tuple[int, ...],
) -> torch.Tensor:
    """The stored values of a weight by its parts, in `to` bits around the middle."""
    values = unpack(weight, bits)
    if codebook is not None:
        return pack(looked_up(values, codebook, bits).int() + ZERO, to).reshape(dims)
    return pack(values + (2 ** (to - 1) - 2 ** (bits - 1)), to).reshape(dims)


@derivation
def block_scales(scale: torch.Tensor, *, times: int, dtype: torch.dtype) -> torch.Tensor:
    """Scales [N,G], each repeated."""
    return scale.to(dtype).repeat_interleave(times, 1)


@derivation
def codes_across(
    weight: torch.Tensor, *, bits: int, to: int, dims: tuple[int, ...]
) -> torch.Tensor:
    """Stored values [N,K] in the order [K,N], in `to` bits."""
    return pack(unpack(weight, bits).T.flatten(), to).reshape(dims)


@derivation
def wide_across(values: torch.Tensor, *, dims: tuple[int, ...]) -> torch.Tensor:
    """Scales or offsets [N,G] as f32[G,N], or f32[G,1,N]."""
    return values.float().T.reshape(dims)


@derivation
def middle_zeros(*, count: int, middle: int, bits: int, dims: tuple[int, ...]) -> torch.Tensor:
    """Zero points that are all the middle."""
    return pack(torch.full((count,), middle), bits).reshape(dims)


@derivation
def packed_zeros(
    scale: torch.Tensor, offset: torch.Tensor, *, bits: int, dims: tuple[int, ...]
) -> torch.Tensor:
    """Zero points of offsets that are whole steps."""
    return pack(_zeros(scale, offset).T.flatten(), bits).reshape(dims)


def _zeros(scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return (-offset.float() / scale.float()).round()


@derivation
def shifts_across(scale: torch.Tensor, offset: torch.Tensor, *, middle: int) -> torch.Tensor:
    """What the sum of a group's activations counts, f32[G,N]."""
    shift: torch.Tensor = offset.float() + middle * scale.float()
    return shift.T


def _is_looked_up(node: torch.fx.Node) -> bool:
    """Whether a table is all stored, and sessions may have the op that looks it up."""
    return are_weights(node) and not quantized_ops_available()


@row(G.quantized_embedding.default, when=_is_looked_up, native=True)
def quantized_embedding(
    e: Emitter,
    ids: oir.Value,
    weight: oir.Value,
    scale: oir.Value,
    offset: oir.Value | None,
    codebook: oir.Value | None,
    bits: int,
    group: int,
) -> Any:
    wide, parts = e.cast(ids, torch.int64), stored_parts(weight, scale, offset, codebook)
    e.ran["look-up", bits, tiles.kernel_name()] += 1
    return rows_tiles.quantized_embedding(e, wide, parts, bits=bits, group=group)


@row(G.quantized_linear.default, when=are_weights)
def quantized_linear(
    e: Emitter,
    x: oir.Value,
    weight: oir.Value,
    scale: oir.Value,
    offset: oir.Value | None,
    codebook: oir.Value | None,
    bias: oir.Value | None,
    bits: int,
    group: int,
    rounded: bool,
    span: int,
) -> Any:
    parts = stored_parts(weight, scale, offset, codebook)
    stored = _Stored(*parts, bits, group)
    if e.cuda:
        return _on_cuda(e, x, stored, bias)
    wide, added = e.cast(x, F32), None if bias is None else e.cast(bias, F32)
    if e.native and not quantized_ops_available():
        e.ran["product", bits, tiles.kernel_name()] += 1
        result = rows_tiles.quantized_linear(
            e, wide, parts, added, bits=bits, group=group, rounded=rounded, span=span
        )
        return e.cast(result, e.dtype(), F32)
    dims = type_of(x).dims
    kernel = DECOMPOSED
    chosen = None if e.qdq or not e.contrib else next(_fitting(e, stored, rounded, span), None)
    if rounded and not span and stored.is_bytes_by_row and not e.qdq:
        result = byte_product(e, wide, stored.weight, stored.scale)
        kernel = "MatMulIntegerToFloat" if e.contrib else "MatMulInteger"
    elif chosen is not None:
        result = _few_bits(e, wide, stored, *chosen, F32, INT8 if rounded else 1)
        kernel = f"MatMulNBits ({chosen[0]} bits, blocks of {chosen[1]})"
        if offset is not None:
            sums = _group_sums(e, wide, dims, group)
            shifts = e.weight(stored.shifts())
            result = e.op("Add", result, _float(e, sums, dims, shifts, rounded))
    elif rounded and span:
        result = _float(e, _in_spans(e, wide, len(dims), span), dims, _values(e, stored), rounded)
    elif rounded:
        values, row_scale = quantized_rows(e, wide)
        steps = e.op("Sub", e.cast(values, F32, U8), e.const(float(ZERO), F32))
        result = e.op("Mul", _float(e, steps, dims, _values(e, stored), rounded), row_scale)
    else:
        result = _float(e, wide, dims, _values(e, stored), rounded)
    e.ran["product", bits, kernel] += 1
    if added is not None:
        result = e.op("Add", result, added)
    return e.cast(result, e.dtype(), F32)


def _in_spans(e: Emitter, x: oir.Value, axes: int, span: int) -> Any:
    """f32 x [...,K] with runs of `span` values rounded to 127 steps each of their largest."""
    kept = [0] * (axes - 1)
    runs = e.op("Reshape", x, e.const([*kept, -1, span], torch.int64))
    largest = e.op("ReduceMax", e.op("Abs", runs), e.const([-1], torch.int64), keepdims=1)
    step = e.op("Div", largest, e.const(127.0, F32))
    zero = e.op("Equal", step, e.const(0.0, F32))
    by = e.op("Where", zero, e.const(1.0, F32), step)
    rounded = e.op("Mul", e.op("Round", e.op("Div", runs, by)), by)
    return e.op("Reshape", rounded, e.const([*kept, -1], torch.int64))


def _on_cuda(e: Emitter, x: oir.Value, stored: _Stored, bias: oir.Value | None) -> Any:
    layout = None if stored.codebook is not None else cuda_layout(stored.bits, stored.group)
    if layout is None:
        raise UnsupportedError(
            f"no kernel of CUDA's provider multiplies {stored.weight.name}, of {stored.bits} bits "
            f"in groups of {stored.group}"
        )
    bits, block = layout
    dtype = type_of(x).dtype
    result = e.cast(_few_bits(e, x, stored, bits, block, dtype), F32, dtype)
    e.ran["product", stored.bits, f"MatMulNBits ({bits} bits, blocks of {block})"] += 1
    if stored.offset is not None:
        sums = _group_sums(e, e.cast(x, F32), type_of(x).dims, stored.group)
        result = e.op("Add", result, e.op("MatMul", sums, e.weight(stored.shifts())))
    if bias is not None:
        result = e.op("Add", result, e.cast(bias, F32))
    return e.cast(result, e.dtype(), F32)


def _fitting(e: Emitter, stored: _Stored, rounded: bool, span: int) -> Iterator[tuple[int, int]]:
    """Bits and blocks in which MatMulNBits does what is asked, the best first."""
    most = span or max(BLOCKS)  # it rounds activations by block
    least = stored.bits if stored.codebook is None else 8
    if stored.codebook is not None and not rounded:
        return  # its entries need not be whole
    # A model for others is to be small; here float products of 2 and 8 bits are faster as floats.
    for bits in (b for b in (ROUNDED if rounded or e.standard else FLOAT) if b >= least):
        for block in (b for b in BLOCKS if b <= most and stored.group % b == 0):
            # A model for others to run cannot know their processors; one that is to verify drafts
            # is at least exact on this one.
            if (
                not rounded
                or (e.standard and not e.paired)
                or rows_of_few_bits_are_exact(bits, block)
            ):
                yield bits, block


def _few_bits(
    e: Emitter,
    x: oir.Value,
    stored: _Stored,
    bits: int,
    block: int,
    dtype: torch.dtype,
    level: int | None = None,
) -> Any:
    """The product by MatMulNBits, in a dtype and at an accuracy level."""
    weight, scales = e.weight(stored.blocked(bits, block)), e.weight(stored.scales(block, dtype))
    sizes = {"K": stored.groups * stored.group, "N": stored.rows}
    how = {"bits": bits, "block_size": block, "accuracy_level": level}
    return e.fused("MatMulNBits", x, weight, scales, **sizes, **how)


def needs_packing(graph: oir.Graph) -> bool:
    """Whether kernels of a graph must repack their weights, however short memory is: MatMulNBits
    would make float weights of them at every step, and a lone row's sums in another order."""
    return any(node.op_type == "MatMulNBits" for node in graph)


def _group_sums(e: Emitter, x: oir.Value, dims: Sequence[Dim], group: int) -> Any:
    """Each group's values added up, f32[...,K/group] of f32 x, once for each x."""

    def make() -> Any:
        grouped = e.reshape(x, dims, (*dims[:-1], int(str(dims[-1])) // group, group))
        return e.op("ReduceSum", grouped, e.const([-1], torch.int64), keepdims=0)

    return e.once(("group sums", x.name, group), make)


def _values(e: Emitter, stored: _Stored) -> oir.Value:
    """The weight's values f32[K,N]: worked out when the model is stored or, with `qdq`, by its
    nodes, of codes of 4 or 8 bits. Codebooks are no codes that ONNX knows."""
    if (e.contrib and not e.qdq) or stored.codebook is not None:
        return e.weight(stored.values())
    bits = 4 if stored.bits <= 4 and stored.rows % 2 == 0 else 8
    codes, dims = stored.across(bits), (stored.groups * stored.group, stored.rows)
    known = e.weight(codes) if bits == 8 else e.nibbles(codes, *dims)
    zeros = stored.whole_zeros(bits)
    laid = None
    if zeros is not None:
        laid = e.weight(zeros) if bits == 8 else e.nibbles(zeros, stored.groups, stored.rows)
    scale = e.weight(stored.scales_across())
    group = stored.group
    found: oir.Value = e.op("DequantizeLinear", known, scale, laid, axis=0, block_size=group)
    if zeros is None:
        grouped = e.op("Reshape", found, e.const([stored.groups, stored.group, -1], torch.int64))
        added = e.op("Add", grouped, e.weight(stored.offsets_across()))
        found = e.op("Reshape", added, e.const(list(dims), torch.int64))
    return found


def _float(e: Emitter, x: oir.Value, dims: Sequence[Dim], columns: oir.Value, rounded: bool) -> Any:
    """x [...,K] times values f32[K,N]; if what is rounded depends on it, a lone row's sums are in
    the order of several's. dims: those of x, whatever its last one is."""
    axis = len(dims) - 2
    if not (rounded and e.paired) or axis < 0 or dims[axis] == 1:
        return e.op("MatMul", x, columns)
    pairs = Pairs(e, dims[axis])
    return pairs.first(e.op("MatMul", pairs.doubled(x, axis, len(dims)), columns), axis)
