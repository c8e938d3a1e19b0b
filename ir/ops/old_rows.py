"""The oldest of a cache's latest rows become codes of groups, and what is kept beside these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .grouped_cache import check_groups, group_values, quantize_groups, store_rows
from .operands import Operands
from .row_forms import low_rank


def _samples() -> Iterator[Sample]:
    past = torch.tensor([10, 4, 22])
    for bits, by_channel, outliers in ((2, True, 1), (4, False, 0), (8, True, 0), (3, False, 2)):
        how: dict[str, Any] = {"bits": bits, "group": 4, "by_channel": by_channel}
        how["outliers"] = outliers
        codes, steps = quantize_groups(torch.randn(3, 2, 24, 8), **how)
        recent, rows = torch.randn(3, 2, 14, 8), torch.randn(3, 2, 8, 8)
        yield (codes, steps, recent, rows, past), how | {"after": 10}


def _check(
    given: Operands, bits: int, group: int, by_channel: bool, after: int, outliers: int
) -> None:
    sizes = given.sizes
    width, rows = sizes["D"], sizes["T"]
    each = check_groups(given.op, width, rows, bits, group, by_channel, outliers)
    numbers = (2 + 2 * outliers) * (width if by_channel else width // each)
    if sizes["K"] * 8 != width * bits or sizes["N"] != numbers:
        raise InputError(
            f"{given.op}: rows of {width} in {bits} bits have codes [B,G,C,{width * bits // 8}] "
            f"and steps [B,G,S,{numbers}], got {sizes['K']} and {sizes['N']} columns"
        )
    for axis, count in (("C", rows), ("S", rows // group if by_channel else rows)):
        if isinstance(sizes[axis], int) and sizes[axis] < count:
            raise InputError(
                f"{given.op}: there is no room for {count} of {axis}, got {sizes[axis]}"
            )
    latest = sizes["R"]
    if isinstance(latest, int) and not rows <= after <= latest:
        raise InputError(
            f"{given.op}: expected rows <= after <= latest rows, got {rows}, {after} and {latest}"
        )


@op(
    "codes: u8 BGCK, steps: f16 BGSN, recent: BGRD, rows: BGTD, past: i64 B, after >= 1 -> "
    "codes, steps, recent",
    samples=_samples,
    also=_check,
    native=Native("BGCKSNRTD"),
)
def store_groups(
    codes: Tensor,
    steps: Tensor,
    recent: Tensor,
    rows: Tensor,
    past: Tensor,
    *,
    bits: int,
    group: int,
    by_channel: bool,
    after: int,
    outliers: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The oldest of the latest rows become codes, and those behind them move up.

    ``%s: (u8[B,G,C,16], f16[B,G,C.2,128], f32[B,G,C.1,64]) = graftwork.store_groups(%kc, %ks, %kr,
    %x, %past, bits=2, group=32, by_channel=True, after=192)``

    codes u8[B,G,C,D*bits/8], steps f16[B,G,S,N] and recent [B,G,R,D], as `attend_grouped` reads
    them; rows [B,G,T,D]: the first T latest rows, in the form in which they are stored; past
    i64[B]: a sequence with fewer than `after` rows is unchanged, of others the latest `after` are
    floats. bits, group, by_channel, outliers: see `quantize_groups`.
    """
    how = {"bits": bits, "group": group, "by_channel": by_channel, "outliers": outliers}
    new_codes, new_steps = quantize_groups(rows, **how)
    count = rows.shape[2]
    moved = torch.cat([recent[:, :, count:after], recent[:, :, after - count :]], dim=2)
    # Rows may be made of `recent`, whose memory the result may take: they are needed before it.
    due = past + 0 * new_codes[:, 0, 0, 0].to(past.dtype) >= after
    return (
        store_rows(codes, new_codes, past, after=after),
        store_rows(steps, new_steps, past, after=after, each=group if by_channel else 1),
        torch.where(due[:, None, None, None], moved, recent),
    )


def _factor_samples() -> Iterator[Sample]:
    past = torch.tensor([10, 4, 22])
    for bits, by_channel, outliers in ((2, True, 1), (4, False, 0)):
        how: dict[str, Any] = {"bits": bits, "group": 4, "by_channel": by_channel}
        how |= {"outliers": outliers, "after": 10}
        factors = low_rank(torch.randn(3, 2, 24, 8), group=4, rank=2)
        yield (*factors, torch.randn(3, 2, 8, 8), past), how


def _check_factors(
    given: Operands, bits: int, group: int, by_channel: bool, after: int, outliers: int
) -> None:
    width, rows, rank = (given.sizes[axis] for axis in "DTX")
    check_groups(given.op, width, rows, bits, group, by_channel, outliers)
    if rows % group or not 1 <= rank <= min(group, width) or given.sizes["Z"] != rank * width:
        raise InputError(
            f"{given.op}: expected whole groups of {group} rows, and right [B,G,Y,X*{width}] of a "
            f"rank X up to that, got {rows} rows, rank {rank} and {given.sizes['Z']} columns"
        )
    if after < rows:
        raise InputError(f"{given.op}: expected after >= rows, got {after} and {rows}")


@op(
    "left: f16 BGCX, right: f16 BGYZ, rows: BGTD, past: i64 B, after >= 1 -> left, right",
    samples=_factor_samples,
    also=_check_factors,
    native=Native("BGCXYZTD"),
)
def store_factors(
    left: Tensor,
    right: Tensor,
    rows: Tensor,
    past: Tensor,
    *,
    bits: int,
    group: int,
    by_channel: bool,
    after: int,
    outliers: int = 0,
) -> tuple[Tensor, Tensor]:
    """Factors of what the codes of rows leave out, see `store_groups`.

    ``%f: (f16[B,G,C,2], f16[B,G,C.2,128]) = graftwork.store_factors(%kl, %kg, %x, %past, bits=2,
    group=64, by_channel=True, after=192)``

    left f16[B,G,C,X] and right f16[B,G,Y,X*D], as `attend_grouped` reads them: of every `group`
    rows, by `low_rank`. The rest as in `store_groups`.
    """
    how = {"bits": bits, "group": group, "by_channel": by_channel, "outliers": outliers}
    error = rows.float() - group_values(*quantize_groups(rows, **how), **how)
    first, second = low_rank(error, group=group, rank=left.shape[3])
    return (
        store_rows(left, first, past, after=after),
        store_rows(right, second, past, after=after, each=group),
    )
