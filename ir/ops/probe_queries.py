"""Probe queries for eviction: a text's first queries, rotated to its end, and a block's mean."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .operands import Operands
from .rotary import turned_on


def _first_samples() -> Iterator[Sample]:
    past = torch.tensor([4, 8, 0])
    yield (torch.randn(3, 2, 3, 4), torch.randn(3, 2, 5, 4), past), {"block": 4, "count": 2}


def _check_count(given: Operands, block: int, count: int) -> None:
    if not 1 <= count <= block:
        raise InputError(f"{given.op}: expected 1 <= count <= block, got {count} and {block}")


@op(
    "opening: BHPD, queries: BHWD, past: i64 B, C = count -> BHCD",
    samples=_first_samples,
    also=_check_count,
)
def first_queries(
    opening: Tensor, queries: Tensor, past: Tensor, *, block: int, count: int
) -> Tensor:
    """The queries of a text's first `count` tokens: taken from its first block, kept afterwards.

    ``%o: f32[B,H,32,D] = graftwork.first_queries(%kv.0.opening, %kv.0.query, %past, block=64,
    count=32)``

    opening [B,H,P,D] and queries [B,H,W,D], P >= count and W >= block; past i64[B], a multiple of
    block, rows are valid.
    """
    index = torch.arange(count, device=past.device)
    kept, new = (x.index_select(2, index) for x in (opening, queries))
    return torch.where((past == block)[:, None, None, None], new.to(kept.dtype), kept)


def _turn_samples() -> Iterator[Sample]:
    angle, past = torch.randn(9, 2), torch.tensor([8, 4])
    for interleaved in (False, True):
        x = torch.randn(2, 2, 3, 6)
        yield (x, past, angle.cos(), angle.sin()), {"interleaved": interleaved}


def _check_turn(given: Operands, x: Tensor, cos: Tensor) -> None:
    if 2 * cos.shape[1] > x.shape[3] or x.shape[2] > cos.shape[0]:
        raise InputError(
            f"{given.op}: expected tables [P,R] with 2R <= D={x.shape[3]} and P >= {x.shape[2]}, "
            f"got {list(cos.shape)}"
        )


@op("x: BHTD, past: i64 B, cos: PR, sin: PR -> x", samples=_turn_samples, also=_check_turn)
def queries_at_end(
    x: Tensor, past: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Rotate queries from positions 0, 1, 2, ... to the positions that end at past - 1.

    ``%q: f32[B,H,32,D] = graftwork.queries_at_end(%o, %past, @cos, @sin)``

    x [B,H,T,D] after `rotary` with row p of the tables cos, sin [P,R] for position p; past i64[B],
    below P; below T, positions begin at 0. Norms do not change.
    """
    count, cos, sin = x.shape[2], cos.float(), sin.float()
    place = torch.arange(count, device=past.device)
    ends = (past[:, None] - count).clamp(min=0) + place
    ends = ends.clamp(max=cos.shape[0] - 1)
    after = cos[ends][:, None], sin[ends][:, None]
    return turned_on(x, (cos[:count], sin[:count]), after, interleaved)


def _probe_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 4, 5, 6),), {"block": 4}
    yield (torch.ones(1, 2, 3, 4),), {"block": 3}


@op("queries: BHWD, block >= 1 -> f32 BH1D", samples=_probe_samples)
def probe_query(queries: Tensor, *, block: int) -> Tensor:
    """One query for a block: the mean of its queries, weighted by the squared distance from their
    plain mean.

    ``%p: f32[B,H,1,D] = graftwork.probe_query(%kv.0.query, block=64)``

    queries [B,H,W,D], W >= block; the first `block` are used, with equal weights if all are equal.
    Source: Xiao et al., "Activation-aware Probe-Query" (2025).
    """
    index = torch.arange(block, device=queries.device)
    rows = queries.index_select(2, index).float()
    mean = rows.mean(2, keepdim=True)
    apart = (rows - mean).pow(2).sum(-1, keepdim=True)
    apart = apart + 1e-20
    return (rows * apart).sum(2, keepdim=True) / apart.sum(2, keepdim=True)
