"""Gathers of hidden states by token and of cache rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, op


def _samples() -> Iterator[Sample]:
    yield (torch.randn(2, 4, 3), torch.tensor([[3], [1]])), {}
    yield (torch.randn(2, 4, 3), torch.tensor([[0, 1, 2, 3], [0, 0, 3, 3]])), {}


@op("x: any BTH, select: i64 BS -> BSH", samples=_samples)
def pick_rows(x: Tensor, select: Tensor) -> Tensor:
    """The hidden states of the chosen tokens of each sequence.

    ``%y: f32[B,S,H] = graftwork.pick_rows(%x, %select)``

    x [B,T,H]; select i64[B,S] in 0..T-1. A prefill selects one row a sequence, to compute logits of
    one token instead of all.
    """
    return x.gather(1, select[:, :, None].expand(-1, -1, x.shape[2]))


def _followed_samples() -> Iterator[Sample]:
    own = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]], dtype=torch.bool)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    for ancestors in (None, tree.expand(2, 4, 4)):
        yield (torch.randn(2, 4, 3), own, ancestors), {}


@op("x: any BTH, own: bool BT, ancestors: bool BTT -> BTH", samples=_followed_samples)
def followed_rows(x: Tensor, own: Tensor, ancestors: Tensor | None) -> Tensor:
    """The state of the nearest token of the step that each one continues and that is the text's
    own, or a draft's; of such a token, its state itself.

    ``%y: f32[B,T,H] = graftwork.followed_rows(%x, %own, None)``

    x [B,T,H]; own bool[B,T]; ancestors bool[B,T,T], the causal order if it is None. A token that
    follows none gets the first one's.
    """
    steps = torch.arange(own.shape[1], device=own.device)
    before = (steps[:, None] >= steps[None, :])[None] if ancestors is None else ancestors
    nearest = torch.where(before & own[:, None, :], steps, 0).amax(-1)
    return x.gather(1, nearest[:, :, None].expand(-1, -1, x.shape[2]))


def _read_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 1, 9, 3), torch.tensor([0, 5]), torch.tensor([[0], [3]])), {}
    yield (torch.randn(1, 1, 9, 3), torch.tensor([4]), torch.tensor([[0, 1, 2, 2]])), {}


@op("cache: B1CH, past: i64 B, select: i64 BS -> BSH", samples=_read_samples)
def cache_read(cache: Tensor, past: Tensor, select: Tensor) -> Tensor:
    """Rows of a cache, counted from each sequence's `past` valid rows.

    ``%x: f32[B,S,H] = graftwork.cache_read(%stream, %past, %select)``

    cache [B,1,C,H]; past i64[B]; select i64[B,S]: rows past + select, below C. Segments of a step
    pass the residual stream on through such a state.
    """
    rows = (past[:, None] + select)[:, :, None].expand(-1, -1, cache.shape[3])
    return cache.squeeze(1).gather(1, rows)


def _packed_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 4, 3), torch.tensor([[0, 1, 2, 4]])), {}
    yield (torch.randn(1, 4, 3), torch.tensor([[0, 1, 2], [3, 0, 0]])), {}
    yield (torch.arange(6).reshape(2, 3, 1), torch.tensor([[5, 0, 1]])), {}


@op("x: any BTH, places: i64 PN -> PNH", samples=_packed_samples)
def take_tokens(x: Tensor, places: Tensor) -> Tensor:
    """Tokens of a batch, whichever sequence they are of.

    ``%y: f32[1,N,H] = graftwork.take_tokens(%x, %packed)``

    x [B,T,H]; places i64[P,N] in 0..B*T-1, counted sequence by sequence: token t of sequence b is
    b * T + t. Packs the tokens of a ragged batch into one row, and unpacks them. Source: Ni et al.,
    "EMS-SD: Efficient Multi-sample Speculative Decoding" (2024).
    """
    rows = x.reshape(-1, x.shape[2]).index_select(0, places.reshape(-1))
    return rows.reshape(places.shape[0], places.shape[1], x.shape[2])
