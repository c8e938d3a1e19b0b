"""Products with weights of few bits on a GPU: kernels as torch ops, and what steps run there.

Decoding reads every weight once a token, so weights stay as they are stored until they are in a
processor's registers. A prompt's products take longer than it takes to make floats of the weights;
so do those of float32, which no tensor core multiplies.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ir import InputError, Program
from ...ir.execution.executable import KernelUse
from ...ir.ops import all_ops
from ...ir.ops.numerics import check_bits, dequantize
from ...ir.ops.quantized import round_rows, round_spans
from ..cuda_blocks import Units, units
from ..kernel_uses import decomposed, uses

G = torch.ops.graftwork
check_quantized_linear = all_ops()["quantized_linear"].declared.check

FEW = 4
"""Tokens up to which whole numbers are added up, and no tile of a tensor core is filled up."""

WIDE = 32
"""Tokens up to which weights are read as they are stored. For more it takes less time to make
floats of a weight, and a library's product."""

MOST_AHEAD = 8
"""Values of a unit up to which a tile is fetched while the one before is worked on."""


@dataclass(frozen=True)
class Way:
    """How a product is shared out. tokens: of a tile, or the only one. rows: outputs of a program.
    columns: units that it reads at a time. parts: programs that share a row. warps, stages: see
    Triton."""

    tokens: int
    rows: int
    columns: int
    parts: int
    warps: int
    stages: int


def way_of(tokens: int, few: bool, looks_up: bool, outputs: int, how: Units) -> Way:
    """What was fastest on an H200, or within 7% of it, for 4 bits and 4,096 rows and columns."""
    tile = 1 << (tokens - 1).bit_length()
    if few:
        rows, columns, warps = {1: (4, 512, 4), 2: (4, 256, 2), 4: (2, 256, 2)}[tile]
        return Way(tile, rows, columns, 1, warps, 2)
    # In bytes a step of 32 tokens in one tile took three times one of 8: two tiles of 16 take less.
    tile = 16 if how.size == how.values else max(16, tile)
    rows, columns, programs = (64, 64, 256) if tile == 16 else (32, 32, 512)
    parts = min(max(1, programs // -(-outputs // rows)), -(-how.count // columns))
    # What is fetched ahead, all values of a unit of some tokens, has to fit into shared memory.
    ahead = how.values <= MOST_AHEAD and not looks_up
    return Way(tile, rows, columns, parts, 4, 2 if ahead else 1)


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    codebook: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
    group: int,
    rounded: bool = True,
    span: int = 0,
) -> Tensor:
    """`graftwork.quantized_linear`; where there are several tokens, products are of the dtype of x
    and their sums float32."""
    check_quantized_linear(x, weight, scale, offset, codebook, bias, bits, group, span)
    if rounded and span:  # the kernel of bytes has one scale a row
        steps, by = round_spans(x, span)
        x, rounded = (steps * by.repeat_interleave(span, -1)).to(x.dtype), False
    tokens, columns, outputs = x.shape[:-1].numel(), x.shape[-1], weight.shape[0]
    how = units(bits, group, columns)
    steps, row_scale = round_rows(x) if rounded else (x, None)
    few = tokens <= FEW and rounded
    if how is None or not (few or (tokens <= WIDE and x.dtype.itemsize == 2)):
        # Sums of whole numbers could be more than float16 can say.
        fed = x if row_scale is None else (steps * row_scale).to(x.dtype)
        values = dequantize(weight, scale, offset, codebook, bits=bits)
        result, row_scale = F.linear(fed, values.to(x.dtype)).float(), None
    else:
        fed = _bytes(steps, bits, how) if few else _planes(steps.to(x.dtype), how)
        book = codebook.to(torch.int8) if few and codebook is not None else codebook
        parts: Tensor = torch.ops.graftwork_gpu.few_bits(fed, weight, scale, offset, book, bits)
        result = parts.sum(0).reshape(*x.shape[:-1], outputs)
    if row_scale is not None:
        result = result * row_scale
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype)


def _planes(x: Tensor, how: Units) -> Tensor:
    """Values [...,K] as [V,M,U]: the p-th of all units together."""
    return x.reshape(-1, how.count, how.values).permute(2, 0, 1).contiguous()


def _bytes(steps: Tensor, bits: int, how: Units) -> Tensor:
    """Whole numbers [...,K] as i8[P,M,U,4], a plane for each four values that are next to each
    other, in bytes of their own, when a unit is shifted and masked."""
    several = steps.to(torch.int8).reshape(-1, how.count, how.values)
    if 8 % bits:
        planes: Tensor = several.unflatten(2, (-1, 4)).permute(2, 0, 1, 3)
        return planes.contiguous()
    planes = several.unflatten(2, (how.size, -1)).permute(3, 0, 1, 2)
    return F.pad(planes, (0, 4 - how.size)).contiguous()


def kernels_of(program: Program) -> tuple[KernelUse, ...]:
    """What runs the products and look-ups of few bits of a program on a GPU."""
    found: list[KernelUse] = []
    for fn in program.functions.values():
        found += uses(fn, {G.quantized_linear.default: "product"}, "Triton")
        found += (use for use in decomposed(fn) if use.what != "product")
    return tuple(found)


@torch.library.custom_op("graftwork_gpu::few_bits", mutates_args=())
def few_bits(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    codebook: Tensor | None,
    bits: int,
) -> Tensor:
    """Products of M tokens with a weight as it is stored: f32[P,M,N], to be added up over P.

    x: what `_planes` makes of activations, or `_bytes` of rounded ones; weight, scale, offset and
    codebook as in `graftwork.quantized_linear`, the codebook i8 beside bytes. Errors: `InputError`
    for what does not fit, or lies where kernels cannot read it.
    """
    how, way, result = _planned(x, weight, scale, offset, codebook, bits)
    if how.size == 4 and weight.data_ptr() % 4:
        raise InputError("graftwork_gpu.few_bits: weight must begin at a multiple of 4 bytes")
    # By name: Triton loads where it is used.
    kernels = importlib.import_module(f"{__package__}.gpu_kernels")
    kernels.run(x, weight, scale, offset, codebook, result, bits, how, way)
    return result


@few_bits.register_fake
def _(*operands: Any) -> Tensor:
    return _planned(*operands)[2]


def _planned(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    codebook: Tensor | None,
    bits: int,
) -> tuple[Units, Way, Tensor]:
    """How kernels read the weight, how they share it out, and what they write."""
    given = {"x": x, "weight": weight, "scale": scale, "offset": offset, "codebook": codebook}
    for name, tensor in given.items():
        if tensor is not None and not (tensor.is_contiguous() and tensor.device == x.device):
            raise InputError(
                f"graftwork_gpu.few_bits: {name} must be contiguous and on {x.device}, got strides "
                f"{tensor.stride()} on {tensor.device}"
            )
    few = x.dtype == torch.int8
    if x.dim() != 3 + few or weight.dim() != 2 or scale.dim() != 2 or not scale.shape[1]:
        raise InputError(
            f"graftwork_gpu.few_bits: expected three axes of x, four of bytes, and two of weight "
            f"and scale, got {[list(tensor.shape) for tensor in (x, weight, scale)]}"
        )
    check_bits(bits)
    columns = weight.shape[1] * 8 // bits
    group = columns // scale.shape[1]
    tokens = x.shape[1]
    like = torch.empty((tokens, columns), device="meta")
    book = codebook.float() if few and codebook is not None else codebook
    check_quantized_linear(like, weight, scale, offset, book, None, bits, group, 0)
    how = units(bits, group, columns)
    if how is None:
        raise InputError(f"graftwork_gpu.few_bits: no units hold {bits} bits in groups of {group}")
    planes = (6 if 8 % bits else 8) // bits
    wanted = (planes, tokens, how.count, 4) if few else (how.values, tokens, how.count)
    if tuple(x.shape) != wanted:
        raise InputError(
            f"graftwork_gpu.few_bits: x must be {list(wanted)} for rows of {columns} values of "
            f"{bits} bits, got {list(x.shape)}"
        )
    way = way_of(tokens, few, codebook is not None, weight.shape[0], how)
    return how, way, x.new_empty((way.parts, tokens, weight.shape[0]), dtype=torch.float32)
