"""Rotary position embedding, and rows that it has turned."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import InputError
from . import Sample, define
from .operands import Operands


def _samples() -> Iterator[Sample]:
    angle = torch.randn(2, 3, 4)
    for interleaved in (False, True):
        for dim in (8, 12):
            x = torch.randn(2, 2, 3, dim)
            yield (x, angle.cos(), angle.sin()), {"interleaved": interleaved}


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    given = Operands("rotary")
    given.fit("x", x, "BHTD")
    given.fit("cos", cos, "ATR")  # A is B or 1
    given.fit("sin", sin, "ATR")
    if cos.shape[0] not in (1, x.shape[0]) or 2 * cos.shape[2] > x.shape[3]:
        raise InputError(
            f"rotary: cos and sin must be [B,T,R] or [1,T,R] with B={x.shape[0]} and 2R <= "
            f"D={x.shape[3]}, got {list(cos.shape)}"
        )


def _fake(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    _check(x, cos, sin)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define(
    "rotary(Tensor x, Tensor cos, Tensor sin, *, bool interleaved=False) -> Tensor",
    samples=_samples,
    fake=_fake,
)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of channels by position-dependent angles; channels beyond 2R pass unchanged.

    ``%y: f32[B,H,T,D] = graftwork.rotary(%x, %cos, %sin, interleaved=False)``

    x [B,H,T,D]; cos, sin [B,T,R] (or [1,T,R]), 2R <= D. Pairs are (i, i + R), or (2i, 2i + 1) when
    `interleaved`. Source: Su et al., "RoFormer" (2021).
    """
    _check(x, cos, sin)
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
    """Rows [...,D] that were rotated by the cosines and sines `before`, rotated by `after` instead.

    Tables may be scaled: what is turned keeps its length.
    """
    (old_cos, old_sin), (new_cos, new_sin) = before, after
    size = old_cos * old_cos + old_sin * old_sin
    cos = (new_cos * old_cos + new_sin * old_sin) / size
    sin = (new_sin * old_cos - new_cos * old_sin) / size
    return rotated(x, cos, sin, interleaved)


def _shift_samples() -> Iterator[Sample]:
    angle = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.3]))
    first, shift = torch.tensor([2, 0]), torch.tensor([-3, 5])
    for interleaved in (False, True):
        given = torch.randn(2, 2, 7, 6), first, shift, angle.cos(), angle.sin()
        yield given, {"interleaved": interleaved}


def _shift_fake(
    keys: Tensor,
    first: Tensor,
    shift: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    given = Operands("shift_rows")
    given.fit("keys", keys, "BGCD")
    given.fit("first", first, "B", torch.int64)
    given.fit("shift", shift, "B", torch.int64)
    given.fit("cos", cos, "PR")
    given.fit("sin", sin, "PR")
    if 2 * cos.shape[1] > keys.shape[3]:
        raise InputError(
            f"shift_rows: expected tables [P,R] with 2R <= D={keys.shape[3]}, got {list(cos.shape)}"
        )
    return torch.empty_like(keys)


@define(
    "shift_rows(Tensor keys, Tensor first, Tensor shift, Tensor cos, Tensor sin, *, "
    "bool interleaved=False) -> Tensor",
    samples=_shift_samples,
    fake=_shift_fake,
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
    """Keys from a row on, rotated on by a number of positions; those before it as they are.

    ``%y: f32[B,G,C,D] = graftwork.shift_rows(%kv.0.key, %past, %shift, @cos, @sin)``

    keys [B,G,C,D] after `rotary` by row p of the tables cos, sin [P,R] for position p; first
    i64[B], a row; shift i64[B], -P < shift < P. Tables may be scaled: what is turned keeps its
    length.
    Source: He et al., "Let the Code LLM Edit Itself When You Edit the Code" (2024).
    """
    _shift_fake(keys, first, shift, cos, sin, interleaved=interleaved)
    angles = [table.float()[shift.abs()][:, None, None] for table in (cos, sin)]
    size = (angles[0] * angles[0] + angles[1] * angles[1]).sqrt()
    forward = torch.sign(shift).to(torch.float32)[:, None, None, None]
    turned = rotated(keys, angles[0] / size, angles[1] / size * forward, interleaved)
    place = torch.arange(keys.shape[2], device=first.device)
    after = place[None] >= first[:, None]
    return torch.where(after[:, None, :, None], turned, keys)
