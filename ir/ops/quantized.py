"""Products with and look-ups in group-quantized weights.

`numerics` documents the bit layout. Activations are quantized by row and sums are exact, so a
token's result does not depend on the other tokens of its step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Product, Sample, op
from .numerics import Numeric, check_bits, dequantize, entries_for, levels
from .operands import Operands

MOST = 127
"""Rounded activations are -MOST .. MOST."""

_EXACT = 512
"""Products of an activation below 2^7 and a level below 2^8 stay below 2^15, so float32 (24 bits)
sums this many of them exactly."""


def round_spans(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """(integer f32 values [...,K], f32 scales [...,K/span]): `round_rows` of each run of `span`
    values of a row."""
    steps, scale = round_rows(x.unflatten(-1, (-1, span)))
    return steps.flatten(-2), scale.squeeze(-1)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(integer f32 values [...,K], f32 scale [...,1]) with x ~ values * scale, over the last axis.

    Symmetric, -127..127, half to even. Scale: 1 for a row of zeros, NaN for one that is not finite,
    so that its results are NaN.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / float(MOST)
    scale = torch.where(scale == 0, 1.0, scale + (scale - scale))
    return torch.round(wide / scale), scale


def check_sizes(given: Operands, columns: int, bits: int, group: int, axes: str = "KPG") -> None:
    """Set the sizes of rows: columns, bytes and groups, by the letters `axes`. Errors:
    `InputError`."""
    check_bits(bits)
    if group < 1 or columns % group or columns * bits % 8:
        raise InputError(
            f"{given.op}: {axes[0]}={columns} must be a multiple of group={group} and fill whole "
            f"bytes with {bits} bits a value"
        )
    sizes = columns, columns * bits // 8, columns // group
    given.sizes |= {axes[0]: sizes[0], axes[1]: sizes[1], axes[2]: sizes[2]}


def check_span(op: str, span: int, columns: int, group: int) -> None:
    """Errors: `InputError` for spans of activations that `columns`, or a weight's groups, are no
    multiple of, nor they of groups."""
    if span < 0 or (span and misfit(span, columns, group)):
        raise InputError(
            f"{op}: span={span}: expected 0 (a row), or a part of {columns} columns that is a "
            f"multiple of group={group}, or divides it and is a multiple of 16"
        )


def rounding(rounded: bool, span: int, *sizes: tuple[int, int]) -> dict[str, bool | int]:
    """Options of a product whose activations are rounded in spans, where its sizes, columns and
    groups, have them, else by row; or not rounded."""
    if not rounded:
        return {"rounded": False}
    return {"span": span} if span and not any(misfit(span, *pair) for pair in sizes) else {}


def misfit(span: int, columns: int, group: int) -> bool:
    """Whether a row of so many columns, of weights in such groups, has no spans of this size."""
    part = span % group == 0 if span >= group else group % span == 0 and span % 16 == 0
    return columns % span != 0 or not part


def _stored(rows: int, columns: int, bits: int, group: int, affine: bool) -> tuple[Tensor, ...]:
    plain = Numeric(bits, group) if not affine else None
    numeric = plain or Numeric(bits, group, "affine", torch.float16)
    found = numeric.quantize(torch.randn(rows, columns))
    return tuple(part for part in found if part is not None)


def _samples() -> Iterator[Sample]:
    options = {"bits": 4, "group": 8}
    yield (torch.randn(2, 3, 16), *_stored(6, 16, 4, 8, False)), options
    affine = _stored(6, 16, 3, 16, True)
    yield (torch.randn(1, 2, 16), *affine, None, torch.randn(6)), {"bits": 3, "group": 16}
    yield (torch.zeros(1, 1, 16), *_stored(6, 16, 8, 4, True)), {"bits": 8, "group": 4}
    book = torch.tensor([-127.0, -20.0, 35.0, 127.0])
    weight, scale = _stored(6, 16, 2, 8, False)
    yield (torch.randn(1, 2, 16), weight, scale, None, book), {"bits": 2, "group": 8}
    books = torch.randint(-127, 128, (2, 32)).float()
    weight, scale = _stored(6, 16, 4, 8, False)
    yield (torch.randn(1, 2, 16), weight, scale, None, books), {"bits": 4, "group": 8}
    yield (torch.randn(3, 16), *_stored(6, 16, 1, 16, True)), {"bits": 1, "group": 16}
    wide = _stored(3, 1200, 6, 1200, False)
    yield (torch.randn(1, 2, 1200), *wide), {"bits": 6, "group": 1200}
    plain = _stored(6, 16, 4, 8, True)
    bias = torch.randn(6)
    yield (torch.randn(2, 3, 16), *plain, None, bias), {**options, "rounded": False}
    yield (torch.randn(2, 3, 16), *plain, None, bias), {**options, "span": 16}
    yield (torch.randn(3, 64), *_stored(6, 64, 8, 64, True)), {"bits": 8, "group": 64, "span": 32}


def _check_stored(
    given: Operands,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    codebook: Tensor | None,
    bits: int,
    pairs: bool = False,
) -> None:
    """Check a stored weight's operands; sizes K, P and G are set. pairs: allow values in pairs and
    several codebooks."""
    given.positive("K", given.sizes["K"])
    given.fit("weight", weight, "NP", torch.uint8)
    given.fit("scale", scale, "NG", half_or_float(scale))
    given.fit("offset", offset, "NG", half_or_float(offset))
    given.sizes["L"] = 2**bits
    if pairs and codebook is not None:
        group = given.sizes["K"] // given.sizes["G"]
        given.sizes["L"] = entries_for(given.op, codebook.shape[-1], bits, group)
    several = pairs and codebook is not None and codebook.dim() == 2
    given.fit("codebook", codebook, "SL" if several else "L", torch.float32)
    if several and given.sizes["N"] % max(given.sizes["S"], 1):
        raise InputError(
            f"{given.op}: {given.sizes['N']} outputs are no runs of {given.sizes['S']} codebooks"
        )
    if offset is not None and codebook is not None:
        raise InputError(f"{given.op}: a weight has an offset or a codebook, not both")


def half_or_float(tensor: Tensor | None) -> torch.dtype:
    """The expected dtype of scales: float16 if they are, else float32."""
    half = tensor is not None and tensor.dtype == torch.float16
    return torch.float16 if half else torch.float32


def _check_linear(
    given: Operands,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    codebook: Tensor | None,
    bits: int,
    group: int,
    span: int,
) -> None:
    check_sizes(given, given.sizes["K"], bits, group)
    check_span(given.op, span, given.sizes["K"], group)
    _check_stored(given, weight, scale, offset, codebook, bits, pairs=True)


@op(
    "x: ...K, also, bias: N -> ...N",
    samples=_samples,
    also=_check_linear,
    product=Product(
        ("weight", "scale", "offset", "bias"),
        inner=3,
        exact=lambda options: bool(options.get("rounded", True)),
    ),
    stored=("weight",),
)
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
    """A linear layer with a quantized weight: x times the transposed weight, plus bias.

    ``%y: f32[B,T,N] = graftwork.quantized_linear(%x, @w.q4, @w.scale, @w.offset, bits=4,
    group=32)``

    x [..., K] floating; weight u8[N, K*bits/8], a bitstream of values q; scale and offset
    f32|f16[N, K/group]; codebook f32[2^bits], f32[32] with pairs of 4 bits, or f32[S,L] with S of
    either; bias [N]. A weight is scale * (q - 2^(bits-1)), with an offset scale * q + offset, with
    a codebook scale * codebook[q] (see `ir.ops.numerics`).

    rounded: row r is quantized, s = max|x_r| / 127 (1 for a row of zeros), a = round(x_r / s), half
    to even. Sums of a group are exact. Groups are added in float32, ascending, each with one
    rounding: y = fma(sum of a * level, scale, y), then with an offset y = fma(sum of a, offset, y).
    The result is y * s + bias. span: so many values of a row share an s, not all. Then a group's
    sums are those of its parts that share one, each times its s: z = fma(sum, s, z), ascending, the
    first rounded as a product; and the result is y + bias. Codebooks hold integers in -127..127.
    Not rounded: the product in float32 with the dequantized weight.
    Source: Dettmers et al., "QLoRA" (2023) for groups; Yao et al., "ZeroQuant" (2022) for rows.
    """
    if not rounded:
        values = dequantize(weight, scale, offset, codebook, bits=bits)
        wide = None if bias is None else bias.float()
        return torch.nn.functional.linear(x.float(), values, wide).to(x.dtype)
    steps, row_scale = round_spans(x, span or x.shape[-1])
    values = levels(weight, offset, codebook, bits=bits)
    total, zero = torch.zeros((), device=x.device), torch.zeros((), device=x.device)
    unit = min(span or group, group)
    for place in range(scale.shape[1]):
        summed, count = zero, zero
        for start in range(place * group, (place + 1) * group, unit):
            part = slice(start, start + unit)
            own = row_scale[..., start // span, None] if span else torch.ones_like(zero)
            summed = fused_multiply_add(_exact_sums(steps[..., part], values[:, part]), own, summed)
            count = fused_multiply_add(steps[..., part].sum(-1, keepdim=True), own, count)
        total = fused_multiply_add(summed, scale[:, place].float(), total)
        if offset is not None:
            total = fused_multiply_add(count, offset[:, place].float(), total)
    result = total if span else total * row_scale
    return (result if bias is None else result + bias.float()).to(x.dtype)


def _exact_sums(steps: Tensor, values: Tensor) -> Tensor:
    """Integers [...,K] times [N,K], summed exactly, then rounded to float32."""
    rows = steps.flatten(0, -2)
    total = torch.zeros((), dtype=torch.int32, device=steps.device)
    for start in range(0, values.shape[1], _EXACT):
        part = slice(start, start + _EXACT)
        found = torch.nn.functional.linear(rows[:, part], values[:, part])
        total = total + found.to(torch.int32)
    return total.float().reshape(*steps.shape[:-1], values.shape[0])


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 values, rounded once.

    The float64 product is exact. The float64 sum rounds to another float32 than the exact sum only
    if it is a midpoint of two; the sum's error then decides.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    kept = total - product
    error = (product - (total - kept)) + (addend - kept)
    near = total.float()
    far = 2 * total - near.double()  # as far away, on the other side
    halfway = (far != near.double()) & (far.float().double() == far)
    upper, lower = torch.maximum(near.double(), far), torch.minimum(near.double(), far)
    nearer = torch.where(error > 0, upper, lower).float()
    return torch.where(halfway & (error != 0), nearer, near)


def _embedding_samples() -> Iterator[Sample]:
    ids = torch.tensor([[0, 5, 2], [1, 1, 4]])
    yield (ids, *_stored(6, 16, 4, 8, False)), {"bits": 4, "group": 8}
    yield (ids, *_stored(6, 16, 3, 16, True)), {"bits": 3, "group": 16}
    weight, scale = _stored(6, 16, 2, 8, False)
    book = torch.tensor([-1.0, -0.25, 0.3, 1.0])
    yield (ids[0], weight, scale, None, book), {"bits": 2, "group": 8}


def _check_embedding(
    given: Operands,
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    codebook: Tensor | None,
    bits: int,
    group: int,
) -> None:
    check_sizes(given, scale.shape[-1] * group, bits, group)
    _check_stored(given, weight, scale, offset, codebook, bits)
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{given.op}: ids must be i64 or i32, got {ids.dtype}")


@op("also -> f32 ids...K", samples=_embedding_samples, also=_check_embedding, stored=("weight",))
def quantized_embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    codebook: Tensor | None = None,
    *,
    bits: int,
    group: int,
) -> Tensor:
    """Rows of a quantized embedding table, as float32.

    ``%h: f32[B,T,K] = graftwork.quantized_embedding(%ids, @e.q4, @e.scale, @e.offset, bits=4,
    group=32)``

    ids i64|i32[...] in 0..N-1; the table as in `quantized_linear`: weight u8[N, K*bits/8], scale
    and offset f32|f16[N, K/group], codebook f32[2^bits]. Only these rows are dequantized.
    Source: Guan et al., "Post-Training 4-bit Quantization on Embedding Tables" (2019).
    """
    rows = torch.nn.functional.embedding
    picked = None if offset is None else rows(ids, offset)
    return dequantize(rows(ids, weight), rows(ids, scale), picked, codebook, bits=bits)


LOOK_UPS = (torch.ops.aten.embedding.default, torch.ops.graftwork.quantized_embedding.default)
"""Ops that read a few rows of a weight, a token each."""
