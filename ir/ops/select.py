"""Choosing which tokens of a step go through the language-model head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, define
from .operands import Operands


def _samples() -> Iterator[Sample]:
    yield (torch.randn(2, 4, 3), torch.tensor([[3], [1]])), {}
    yield (torch.randn(2, 4, 3), torch.tensor([[0, 1, 2, 3], [0, 0, 3, 3]])), {}


def _check(x: Tensor, select: Tensor) -> None:
    given = Operands("pick_rows")
    given.fit("x", x, "BTH", x.dtype)
    given.fit("select", select, "BS", torch.int64)


def _fake(x: Tensor, select: Tensor) -> Tensor:
    _check(x, select)
    return x.new_empty((*select.shape, x.shape[2]))


@define("pick_rows(Tensor x, Tensor select) -> Tensor", samples=_samples, fake=_fake)
def pick_rows(x: Tensor, select: Tensor) -> Tensor:
    """The hidden states of the chosen tokens of each sequence.

    ``%y: f32[B,S,H] = graftwork.pick_rows(%x, %select)``

    x [B,T,H]; select i64[B,S] with values in 0..T-1. A prefill asks for one row a sequence and so
    computes one row of logits instead of a prompt's worth.
    """
    _check(x, select)
    return x.gather(1, select[:, :, None].expand(-1, -1, x.shape[2]))


def _read_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 1, 9, 3), torch.tensor([0, 5]), torch.tensor([[0], [3]])), {}
    yield (torch.randn(1, 1, 9, 3), torch.tensor([4]), torch.tensor([[0, 1, 2, 2]])), {}


def _check_read(cache: Tensor, past: Tensor, select: Tensor) -> None:
    given = Operands("cache_read")
    given.fit("cache", cache, "B1CH")
    given.fit("past", past, "B", torch.int64)
    given.fit("select", select, "BS", torch.int64)


def _read_fake(cache: Tensor, past: Tensor, select: Tensor) -> Tensor:
    _check_read(cache, past, select)
    return cache.new_empty((*select.shape, cache.shape[3]))


@define(
    "cache_read(Tensor cache, Tensor past, Tensor select) -> Tensor",
    samples=_read_samples,
    fake=_read_fake,
)
def cache_read(cache: Tensor, past: Tensor, select: Tensor) -> Tensor:
    """Rows of a cache, counted from each sequence's `past` valid rows.

    ``%x: f32[B,S,H] = graftwork.cache_read(%stream, %past, %select)``

    cache [B,1,C,H]; past i64[B]; select i64[B,S]; row past + select of each sequence, which is one
    of its C. What one call of a step leaves in a state, the next one takes up so.
    """
    _check_read(cache, past, select)
    rows = (past[:, None] + select)[:, :, None].expand(-1, -1, cache.shape[3])
    return cache.squeeze(1).gather(1, rows)
