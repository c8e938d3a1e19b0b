"""Attention over caches whose older rows are quantized in groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .attention import attend
from .grouped_cache import (
    HALF,
    U8,
    check_channels,
    check_groups,
    group_values,
    join_rows,
    quantize_groups,
)
from .operands import Operands
from .quantized_cache import hadamard
from .rotary import rotated
from .row_forms import low_rank, low_rank_rows

Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Codes, steps and, where there are some, the factors of what these leave out."""


def _samples() -> Iterator[Sample]:
    mask = torch.rand(2, 1, 3, 12) < 0.7
    mask[..., 0] = True
    for bits, outliers, rank, turned, rotated_too, keys, values in (
        (2, 0, 0, False, False, True, False),
        (4, 1, 1, False, False, False, True),
        (3, 0, 0, True, False, False, False),
        (8, 2, 0, True, True, True, True),
    ):
        given: list[Tensor] = []
        factors: list[Tensor | None] = []
        for by_channel in (keys, values):
            rows = torch.randn(2, 2, 12, 8)
            how: dict[str, Any] = {"bits": bits, "group": 4, "outliers": outliers}
            given += quantize_groups(rows, by_channel=by_channel, **how)
            given.append(torch.randn(2, 2, 7, 8))
            factors += low_rank(rows * 0.1, group=4, rank=rank) if rank else (None, None)
        angle = torch.rand(1, 12, 3)
        angles = (angle.cos(), angle.sin()) if rotated_too else (None, None)
        how |= {"keys_by_channel": keys, "values_by_channel": values, "turned": turned}
        how |= {"residual": 4, "block": 4, "scale": 0.3}
        first = (torch.randn(2, 4, 3, 8), *given, torch.tensor([9, 2]), mask)
        yield (*first, None, None, *factors, *angles), how
        extras = torch.randn(2, 4, 3, 12), torch.randn(4)
        yield (*first, *extras, *factors, *angles), how | {"softcap": 4.0}


def _check(
    given: Operands,
    k: Tensor,
    k_steps: Tensor,
    v: Tensor,
    v_steps: Tensor,
    k_left: Tensor | None,
    k_right: Tensor | None,
    v_left: Tensor | None,
    v_right: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    bits: int,
    group: int,
    keys_by_channel: bool,
    values_by_channel: bool,
    outliers: int,
    turned: bool,
) -> None:
    sizes = given.sizes
    for name, codes, steps, axes, by in (
        ("k", k, k_steps, "DKSN", keys_by_channel),
        ("v", v, v_steps, "ELUM", values_by_channel),
    ):
        width = sizes[axes[0]]
        if sizes[axes[1]] * 8 != width * bits:
            given.refuse(name, codes, ("B", "G", "C", f"{axes[0]}*{bits}/8"), U8)
        each = check_groups(given.op, width, None, bits, group, by, outliers)
        numbers = (2 + 2 * outliers) * (width if by else width // each)
        if sizes[axes[3]] != numbers or (not by and sizes[axes[2]] != sizes["C"]):
            rows = axes[2] if by else "C"
            given.refuse(f"{name}_steps", steps, ("B", "G", rows, f"{numbers}"), HALF)
        if by:
            check_channels(given.op, f"{name}_steps", sizes[axes[2]], sizes["C"], group)
        if turned and width & (width - 1):
            raise InputError(
                f"{given.op}: rows of {width} have no Hadamard matrix: it must be a power of two"
            )
    for left, right, axes in ((k_left, k_right, "ZD"), (v_left, v_right, "WE")):
        if (left is None) != (right is None):
            raise InputError(f"{given.op}: both factors of a low rank are given, or none")
        if left is not None and sizes[axes[0]] != sizes["X"] * sizes[axes[1]]:
            raise InputError(
                f"{given.op}: factors of rank {sizes['X']} and rows of {sizes[axes[1]]} have "
                f"{sizes[axes[0]]} numbers"
            )
    if (cos is None) != (sin is None) or (cos is not None and 2 * sizes["A"] > sizes["D"]):
        raise InputError(f"{given.op}: cos and sin go together, and are f32[1,C,A] with 2A <= D")


@op(
    "q: BHTD, k: u8 BGCK, k_steps: f16 BGSN, k_recent: BGRD, v: u8 BGCL, v_steps: f16 BGUM, "
    "v_recent: BGRE, past: i64 B, mask: bool B1TC, bias: BHTC, sinks: H, k_left: f16 BGCX, "
    "k_right: f16 BGYZ, v_left: f16 BGCX, v_right: f16 BGYW, cos: f32 1CA, sin: f32 1CA, H % G, "
    "C >= 1, R >= 1 -> BHTE",
    samples=_samples,
    also=_check,
    native=Native("BHGTCDERSUNMXYA", cast="bias sinks"),
)
def attend_grouped(
    q: Tensor,
    k: Tensor,
    k_steps: Tensor,
    k_recent: Tensor,
    v: Tensor,
    v_steps: Tensor,
    v_recent: Tensor,
    past: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    k_left: Tensor | None = None,
    k_right: Tensor | None = None,
    v_left: Tensor | None = None,
    v_right: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    bits: int,
    group: int,
    keys_by_channel: bool,
    values_by_channel: bool,
    residual: int,
    block: int,
    scale: float,
    outliers: int = 0,
    turned: bool = False,
    interleaved: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """`attend` over rows whose older ones are the codes of `quantize_groups`.

    ``%y: f32[B,H,T,E] = graftwork.attend_grouped(%q, %kc, %ks, %kr, %vc, %vs, %vr, %past, %m,
    bits=2, group=32, keys_by_channel=True, values_by_channel=False, residual=128, block=64,
    scale=0.125)``

    q [B,H,T,D]; k u8[B,G,C,D*bits/8] and v u8[B,G,C,E*bits/8], k_steps and v_steps f16, as
    `quantize_groups` returns them. k_left, v_left f16[B,G,C,X], k_right f16[B,G,Y,X*D] and v_right
    f16[B,G,Y,X*E], as `low_rank` returns them, are added; turned: then rows are multiplied by a
    Hadamard matrix; cos, sin f32[1,C,A]: then keys are rotated as `rotary` does. k_recent
    [B,G,R,D], v_recent [B,G,R,E] and past i64[B]: the latest rows, see `join_rows`. mask, bias,
    sinks, softcap as in `attend`.
    """
    keys = _read((k, k_steps, k_left, k_right), bits, group, keys_by_channel, outliers, turned)
    values = _read((v, v_steps, v_left, v_right), bits, group, values_by_channel, outliers, turned)
    if cos is not None and sin is not None:
        keys = rotated(keys, cos[:, None], sin[:, None], interleaved)
    keys = join_rows(keys, k_recent, past, residual=residual, block=block)
    values = join_rows(values, v_recent, past, residual=residual, block=block)
    result: Tensor = attend(q, keys, values, mask, bias, sinks, scale=scale, softcap=softcap)
    return result


def _read(
    stored: Parts, bits: int, group: int, by_channel: bool, outliers: int, turned: bool
) -> Tensor:
    """Dequantized rows f32[B,G,C,D]."""
    codes, steps, left, right = stored
    how = {"bits": bits, "group": group, "outliers": outliers}
    rows: Tensor = group_values(codes, steps, by_channel=by_channel, **how)
    if left is not None and right is not None:
        rows = rows + low_rank_rows(left, right, group=group)
    return hadamard(rows) if turned else rows
