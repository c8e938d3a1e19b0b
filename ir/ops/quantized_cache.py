"""Caches quantized by row, and attention over them.

A row's values are ``step * code + least``: its minimum has the code 0, its maximum all ones. Rows
are quantized once, independently of each other. A Hadamard transform spreads outlier channels over
the row first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .attention import attend
from .operands import Operands

BITS = (4, 8)


def hadamard(x: Tensor) -> Tensor:
    """Rows [..., D], D a power of two, times the orthogonal Hadamard matrix, its own inverse."""
    width = x.shape[-1]
    apart = 1
    while apart < width:
        pairs = x.reshape(*x.shape[:-1], width // (2 * apart), 2, apart)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], dim=-2).reshape(x.shape)
        apart *= 2
    return x * (1 / math.sqrt(width))


def _quantize_samples() -> Iterator[Sample]:
    for bits, turned in ((8, False), (4, True)):
        yield (torch.randn(2, 2, 3, 8),), {"bits": bits, "turned": turned}


def check_stored(op: str, width: int, bits: int, turned: bool) -> None:
    """Errors: `InputError` for rows that cannot be quantized like this."""
    if bits not in BITS or width < 2 or width % 2:
        raise InputError(
            f"{op}: expected rows of an even width in {BITS} bits, got {width}, {bits}"
        )
    if turned and width & (width - 1):
        raise InputError(
            f"{op}: rows of {width} have no Hadamard matrix: it must be a power of two"
        )


def _check_rows(given: Operands, bits: int, turned: bool) -> None:
    check_stored(given.op, given.sizes["D"], bits, turned)


@op(
    "x: BGTD, K = D * bits // 8 -> u8 BGTK, f32 BGT2",
    samples=_quantize_samples,
    also=_check_rows,
    native=Native("BGTD", cast="x"),
)
def quantize_rows(x: Tensor, *, bits: int, turned: bool) -> tuple[Tensor, Tensor]:
    """Quantize rows to 4 or 8 bits, each with its own step and minimum.

    ``%r: (u8[B,G,T,32], f32[B,G,T,2]) = graftwork.quantize_rows(%k, bits=4, turned=True)``

    x [B,G,T,D] -> codes u8[B,G,T,D*bits/8] and steps f32[B,G,T,2]: step and minimum. Of 4 bits, a
    byte's lower half is a code of the row's first half. turned: rows are multiplied by a Hadamard
    matrix first; D is a power of two.
    Source: Ashkboos et al., "QuaRot" (2024).
    """
    rows = hadamard(x.float()) if turned else x.float()
    least, most = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    step = (most - least) / float(2**bits - 1)
    codes = torch.round((rows - least) / torch.where(step > 0, step, torch.ones_like(step)))
    codes = torch.clamp(codes, 0.0, float(2**bits - 1))
    return packed(codes, bits), torch.cat([step, least], dim=-1)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Integers f32[...,D] as bytes, two in each for 4 bits."""
    if bits == 4:
        half = codes.shape[-1] // 2
        codes = codes[..., :half] + codes[..., half:] * 16.0
    return codes.to(torch.uint8)


def stored_values(codes: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Dequantized values f32[...,D] of codes u8[...,D*bits/8] and steps f32[...,2]."""
    numbers = codes.float()
    if bits == 4:
        high = torch.floor(numbers * (1 / 16))
        numbers = torch.cat([numbers - high * 16.0, high], dim=-1)
    return numbers * steps[..., :1] + steps[..., 1:]


def _stored_samples() -> Iterator[Sample]:
    for bits, turned in ((8, True), (4, False)):
        how = {"bits": bits, "turned": turned}
        yield quantize_rows(torch.randn(2, 2, 5, 8), **how), how


def _check_codes(given: Operands, bits: int, turned: bool) -> None:
    given.sizes["D"] = given.sizes["K"] * 8 // max(bits, 1)
    check_stored(given.op, given.sizes["D"], bits, turned)


@op(
    "S = 2, codes: u8 BGCK, steps: f32 BGCS -> f32 BGCD",
    samples=_stored_samples,
    also=_check_codes,
)
def stored_rows(codes: Tensor, steps: Tensor, *, bits: int, turned: bool) -> Tensor:
    """Dequantize the rows of `quantize_rows`.

    ``%k: f32[B,G,C,D] = graftwork.stored_rows(%kc, %ks, bits=8, turned=True)``

    codes u8[B,G,C,D*bits/8] and steps f32[B,G,C,2], see there.
    """
    rows = stored_values(codes, steps, bits)
    return hadamard(rows) if turned else rows


def _attend_samples() -> Iterator[Sample]:
    mask = torch.rand(2, 1, 3, 9) < 0.5
    mask[..., 0] = True
    for bits, turned in ((8, True), (4, False)):
        stored = [quantize_rows(torch.randn(2, 2, 9, 8), bits=bits, turned=turned) for _ in "kv"]
        given = (torch.randn(2, 4, 3, 8), *stored[0], *stored[1], mask)
        yield given, {"bits": bits, "turned": turned, "scale": 0.3}
        extras = {"bias": torch.randn(2, 4, 3, 9), "sinks": torch.randn(4), "softcap": 4.0}
        yield given, {"bits": bits, "turned": turned, "scale": 0.3, **extras}


def _check_attend(given: Operands, bits: int, turned: bool) -> None:
    for width in (given.sizes["D"], given.sizes["V"] * 8 // max(bits, 1)):
        check_stored(given.op, width, bits, turned)


@op(
    "S = 2, q: BHTD, K = D * bits // 8, k: u8 BGCK, k_steps: f32 BGCS, v: u8 BGCV, v_steps: f32 "
    "BGCS, mask: bool B1TC, bias: BHTC, sinks: H, H % G, C >= 1, also, E = V * 8 // bits -> q BHTE",
    samples=_attend_samples,
    also=_check_attend,
    native=Native("BHGTCDE", cast="bias sinks"),
)
def attend_quantized(
    q: Tensor,
    k: Tensor,
    k_steps: Tensor,
    v: Tensor,
    v_steps: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    bits: int,
    turned: bool,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`attend` over rows quantized by `quantize_rows`.

    ``%y: f32[B,H,T,E] = graftwork.attend_quantized(%q, %k, %ks, %v, %vs, %m, bits=4, turned=True,
    scale=0.125)``

    q [B,H,T,D]; k u8[B,G,C,D*bits/8], v u8[B,G,C,E*bits/8]; k_steps, v_steps f32[B,G,C,2]; mask,
    bias, sinks, softcap as in `attend`. `turned` as in `quantize_rows`, of keys and values.
    """
    keys, values = stored_values(k, k_steps, bits), stored_values(v, v_steps, bits)
    query = hadamard(q.float()) if turned else q.float()
    out = attend(query, keys, values, mask, bias, sinks, scale=scale, softcap=softcap)
    out = hadamard(out) if turned else out
    return out.to(q.dtype)


def _static_samples() -> Iterator[Sample]:
    for bits in (8, 4):
        yield (torch.randn(2, 2, 5, 8), torch.rand(2, 8) + 0.01, torch.randn(2, 8)), {"bits": bits}


def _check_static(given: Operands, bits: int) -> None:
    _check_rows(given, bits, turned=False)


@op(
    "x: BGTD, step: f32 GD, least: f32 GD, K = D * bits // 8 -> u8 BGTK",
    samples=_static_samples,
    also=_check_static,
    native=Native("BGTD", cast="x"),
)
def static_codes(x: Tensor, step: Tensor, least: Tensor, *, bits: int) -> Tensor:
    """Quantize rows to 4 or 8 bits with a fixed step and minimum per channel, clipped.

    ``%c: u8[B,G,T,32] = graftwork.static_codes(%k, @kv.0.key.step, @kv.0.key.least, bits=4)``

    x [B,G,T,D]; step, least f32[G,D], steps above 0 -> u8[B,G,T,D*bits/8], packed as in
    `quantize_rows`.
    """
    codes = torch.round((x.float() - least[:, None]) / step[:, None])
    return packed(torch.clamp(codes, 0.0, float(2**bits - 1)), bits)


def _unit_samples() -> Iterator[Sample]:
    yield (torch.randint(0, 255, (2, 2, 5, 4), dtype=torch.uint8),), {}


@op("codes: u8 BGCK -> f32 BGC2", samples=_unit_samples)
def unit_steps(codes: Tensor) -> Tensor:
    """Steps of rows whose values are their codes: step 1, minimum 0.

    ``%u: f32[B,G,C,2] = graftwork.unit_steps(%kc)``

    codes u8[B,G,C,K].
    """
    one = torch.ones_like(codes[..., :1], dtype=torch.float32)
    return torch.cat([one, one - one], dim=-1)
