"""Rows of pictures in a text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, define
from .operands import Operands


def _samples() -> Iterator[Sample]:
    tokens = torch.tensor([[3, 9, 8, 1], [11, 0, 9, 2]])
    yield (torch.randn(2, 4, 3), tokens, torch.randn(2, 5, 3), 7), {}
    yield (torch.randn(2, 4, 3), tokens, torch.randn(2, 1, 3), 12), {}


def _check(x: Tensor, tokens: Tensor, rows: Tensor) -> None:
    given = Operands("placed_rows")
    given.fit("x", x, "BTH", x.dtype)
    given.fit("tokens", tokens, "BT", torch.int64)
    given.fit("rows", rows, "BEH", x.dtype)


def _fake(x: Tensor, tokens: Tensor, rows: Tensor, first: int) -> Tensor:
    _check(x, tokens, rows)
    return torch.empty_like(x)


@define(
    "placed_rows(Tensor x, Tensor tokens, Tensor rows, int first) -> Tensor",
    samples=_samples,
    fake=_fake,
)
def placed_rows(x: Tensor, tokens: Tensor, rows: Tensor, first: int) -> Tensor:
    """What a model reads of tokens, where some stand for rows that were made outside of it.

    ``%y: f32[B,T,H] = graftwork.placed_rows(%x, %tokens, %pictures, 32064)``

    x [B,T,H]: of tokens i64[B,T]; rows [B,E,H]. Token `first` + k stands for row k, and k >= E for
    row E - 1; the others are what x says. A model of text that reads pictures takes rows of theirs
    in the places of tokens (Liu et al., "Visual Instruction Tuning", 2023).
    """
    _check(x, tokens, rows)
    place = (tokens - first).clamp(0, rows.shape[1] - 1)
    found = rows.gather(1, place[:, :, None].expand(-1, -1, x.shape[2]))
    return torch.where((tokens >= first)[:, :, None], found, x)
