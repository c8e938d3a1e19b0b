"""Queries that ask for others: those of a text's first tokens, turned to its end, and one that
stands for a block's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import InputError
from . import Sample, define
from .operands import Operands
from .rotary import turned_on

I64 = torch.int64


def _first_samples() -> Iterator[Sample]:
    past = torch.tensor([4, 8, 0])
    yield (torch.randn(3, 2, 3, 4), torch.randn(3, 2, 5, 4), past), {"block": 4, "count": 2}


def _first_fake(
    opening: Tensor, queries: Tensor, past: Tensor, *, block: int, count: int
) -> Tensor:
    given = Operands("first_queries")
    given.fit("opening", opening, "BHPD")
    given.fit("queries", queries, "BHWD")
    given.fit("past", past, "B", I64)
    if not 1 <= count <= block:
        raise InputError(f"first_queries: expected 1 <= count <= block, got {count} and {block}")
    return opening.new_empty((*opening.shape[:2], count, opening.shape[3]))


@define(
    "first_queries(Tensor opening, Tensor queries, Tensor past, *, int block, int count) -> Tensor",
    samples=_first_samples,
    fake=_first_fake,
)
def first_queries(
    opening: Tensor, queries: Tensor, past: Tensor, *, block: int, count: int
) -> Tensor:
    """The queries of a text's first `count` tokens: those of its last block, where that is its
    first one, and otherwise those that were kept then.

    ``%o: f32[B,H,32,D] = graftwork.first_queries(%kv.0.opening, %kv.0.query, %past, block=64,
    count=32)``

    opening [B,H,P,D] and queries [B,H,W,D], P >= count and W >= block; past i64[B], a multiple of
    block, rows are valid.
    """
    _first_fake(opening, queries, past, block=block, count=count)
    index = torch.arange(count, device=past.device)
    kept, new = (x.index_select(2, index) for x in (opening, queries))
    return torch.where((past == block)[:, None, None, None], new.to(kept.dtype), kept)


def _turn_samples() -> Iterator[Sample]:
    angle, past = torch.randn(9, 2), torch.tensor([8, 4])
    for interleaved in (False, True):
        x = torch.randn(2, 2, 3, 6)
        yield (x, past, angle.cos(), angle.sin()), {"interleaved": interleaved}


def _turn_fake(
    x: Tensor, past: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    given = Operands("queries_at_end")
    given.fit("x", x, "BHTD")
    given.fit("past", past, "B", I64)
    given.fit("cos", cos, "PR")
    given.fit("sin", sin, "PR")
    if 2 * cos.shape[1] > x.shape[3] or x.shape[2] > cos.shape[0]:
        raise InputError(
            f"queries_at_end: expected tables [P,R] with 2R <= D={x.shape[3]} and P >= "
            f"{x.shape[2]}, got {list(cos.shape)}"
        )
    return torch.empty_like(x)


@define(
    "queries_at_end(Tensor x, Tensor past, Tensor cos, Tensor sin, *, bool interleaved=False) "
    "-> Tensor",
    samples=_turn_samples,
    fake=_turn_fake,
)
def queries_at_end(
    x: Tensor, past: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Queries that were rotated for positions 0, 1, 2, ..., rotated for those that end at past - 1.

    ``%q: f32[B,H,32,D] = graftwork.queries_at_end(%o, %past, @cos, @sin)``

    x [B,H,T,D] after `rotary` with row p of the tables cos, sin [P,R] for position p; past i64[B],
    below P; where it is less than T they stay about where they are. What is turned keeps its
    length.
    """
    _turn_fake(x, past, cos, sin, interleaved=interleaved)
    count, cos, sin = x.shape[2], cos.float(), sin.float()
    place = torch.arange(count, device=past.device)
    ends = (past[:, None] - count).clamp(min=0) + place
    ends = ends.clamp(max=cos.shape[0] - 1)
    after = cos[ends][:, None], sin[ends][:, None]
    return turned_on(x, (cos[:count], sin[:count]), after, interleaved)


def _probe_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 4, 5, 6),), {"block": 4}
    yield (torch.ones(1, 2, 3, 4),), {"block": 3}


def _probe_fake(queries: Tensor, *, block: int) -> Tensor:
    Operands("probe_query").fit("queries", queries, "BHWD")
    if block < 1:
        raise InputError(f"probe_query: expected block >= 1, got {block}")
    return queries.new_empty((*queries.shape[:2], 1, queries.shape[3]), dtype=torch.float32)


@define(
    "probe_query(Tensor queries, *, int block) -> Tensor",
    samples=_probe_samples,
    fake=_probe_fake,
)
def probe_query(queries: Tensor, *, block: int) -> Tensor:
    """One query that stands for those of a block: their mean, each weighing as much as the square
    of its distance from their plain mean.

    ``%p: f32[B,H,1,D] = graftwork.probe_query(%kv.0.query, block=64)``

    queries [B,H,W,D], W >= block, of which the first `block` count. Where all are alike, they weigh
    the same. Source: Xiao et al., "Activation-aware Probe-Query" (2025): tokens whose activations
    are far from their window's are those that carry its meaning.
    """
    _probe_fake(queries, block=block)
    index = torch.arange(block, device=queries.device)
    rows = queries.index_select(2, index).float()
    mean = rows.mean(2, keepdim=True)
    apart = (rows - mean).pow(2).sum(-1, keepdim=True)
    apart = apart + 1e-20
    return (rows * apart).sum(2, keepdim=True) / apart.sum(2, keepdim=True)
