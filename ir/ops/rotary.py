"""Rotary position embedding, and changes of position of rotated rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .operands import Operands


def _samples() -> Iterator[Sample]:
    angle = torch.randn(2, 3, 4)
    for interleaved in (False, True):
        for dim in (8, 12):
            x = torch.randn(2, 2, 3, dim)
            yield (x, angle.cos(), angle.sin()), {"interleaved": interleaved}


def _check(given: Operands, x: Tensor, cos: Tensor) -> None:
    if cos.shape[0] not in (1, x.shape[0]) or 2 * cos.shape[2] > x.shape[3]:
        raise InputError(
            f"rotary: cos and sin must be [B,T,R] or [1,T,R] with B={x.shape[0]} and 2R <= "
            f"D={x.shape[3]}, got {list(cos.shape)}"
        )


@op("x: BHTD, cos: ATR, sin: ATR -> x", samples=_samples, also=_check)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of channels by position-dependent angles; channels beyond 2R pass unchanged.

    ``%y: f32[B,H,T,D] = graftwork.rotary(%x, %cos, %sin, interleaved=False)``

    x [B,H,T,D]; cos, sin [B,T,R] (or [1,T,R]), 2R <= D. Pairs are (i, i + R), or (2i, 2i + 1) when
    `interleaved`. Source: Su et al., "RoFormer" (2021).
    """
    return rotated(x, cos[:, None], sin[:, None], interleaved)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rows [...,D] with their first 2R channels rotated, for cos and sin [...,R] that broadcast."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((out.to(x.dtype), rest), dim=-1)


def turned_on(
    x: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], interleaved: bool
) -> Tensor:
    """Rotate rows [...,D] from the angles `before` to the angles `after`, each (cos, sin). Tables
    may be scaled: norms do not change."""
    (old_cos, old_sin), (new_cos, new_sin) = before, after
    size = old_cos * old_cos + old_sin * old_sin
    cos = (new_cos * old_cos + new_sin * old_sin) / size
    sin = (new_sin * old_cos - new_cos * old_sin) / size
    return rotated(x, cos, sin, interleaved)


def check_tables(given: Operands, cos: Tensor) -> None:
    """Errors: `InputError` for tables [P,R] with 2R > D."""
    if 2 * given.sizes["R"] > given.sizes["D"]:
        raise InputError(
            f"{given.op}: expected tables [P,R] with 2R <= D={given.sizes['D']}, "
            f"got {list(cos.shape)}"
        )


def _shift_samples() -> Iterator[Sample]:
    angle = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.3]))
    first, shift = torch.tensor([2, 0]), torch.tensor([-3, 5])
    for interleaved in (False, True):
        given = torch.randn(2, 2, 7, 6), first, shift, angle.cos(), angle.sin()
        yield given, {"interleaved": interleaved}


@op(
    "keys: BGCD, first: i64 B, shift: i64 B, cos: PR, sin: PR -> keys",
    samples=_shift_samples,
    also=check_tables,
)
def shift_rows(
    keys: Tensor,
    first: Tensor,
    shift: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotate keys from row `first` on by `shift` positions.

    ``%y: f32[B,G,C,D] = graftwork.shift_rows(%kv.0.key, %past, %shift, @cos, @sin)``

    keys [B,G,C,D] after `rotary` by row p of the tables cos, sin [P,R] for position p; first
    i64[B], a row; shift i64[B], -P < shift < P. Tables may be scaled: norms do not change.
    Source: He et al., "Let the Code LLM Edit Itself When You Edit the Code" (2024).
    """
    angles = [table.float()[shift.abs()][:, None, None] for table in (cos, sin)]
    size = (angles[0] * angles[0] + angles[1] * angles[1]).sqrt()
    forward = torch.sign(shift).to(torch.float32)[:, None, None, None]
    turned = rotated(keys, angles[0] / size, angles[1] / size * forward, interleaved)
    place = torch.arange(keys.shape[2], device=first.device)
    after = place[None] >= first[:, None]
    return torch.where(after[:, None, :, None], turned, keys)
