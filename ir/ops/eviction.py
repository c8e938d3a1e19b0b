"""Cache eviction: scores of rows, and the rows that a full cache keeps.

A method computes a score for every row; `keep_top` selects rows by score. Scores are rounded and
ties go to the later row, so float noise does not change the selection between backends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .attention import capped, grouped
from .operands import Operands
from .rotary import check_tables, turned_on

I64 = torch.int64
STEPS = 1024.0
"""Scores, or their logarithms if their ratios count, are rounded to multiples of 1 / STEPS."""

LEAST = 1e-30
"""Lower bound of a score before its logarithm is taken."""


def rounded(scores: Tensor) -> Tensor:
    """Scores in integer multiples of 1 / STEPS, exact in float32."""
    return torch.round(scores.float() * STEPS)


def rounded_log(scores: Tensor) -> Tensor:
    """Rounded logarithms of scores >= 0, for scores whose ratios count."""
    return rounded(scores.float().clamp(min=LEAST).log())


@op("keys: BGCD -> f32 BGC", samples=lambda: _norm_samples())
def row_scores_age(keys: Tensor) -> Tensor:
    """Scores 0 for all rows: the latest are kept.

    ``%s: f32[B,G,C] = graftwork.row_scores_age(%kv.0.key)``

    keys [B,G,C,D].
    """
    return torch.zeros_like(keys[..., 0], dtype=torch.float32)


def _norm_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 2, 7, 4),), {}


@op("keys: BGCD -> f32 BGC", samples=_norm_samples)
def row_scores_norm(keys: Tensor) -> Tensor:
    """Score by minus the logarithm of the key's L2 norm.

    ``%s: f32[B,G,C] = graftwork.row_scores_norm(%kv.0.key)``

    keys [B,G,C,D]. Scores are in 1/1024 of a natural logarithm. Source: Devoto et al., "A Simple
    and Effective L2 Norm-Based Strategy for KV Cache Compression" (2024).
    """
    squares = keys.float().pow(2).sum(-1)
    return -rounded(squares.clamp(min=LEAST).log() * 0.5)


def _keydiff_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 2, 7, 4), torch.tensor([3, 7])), {}


@op("keys: BGCD, past: i64 B -> f32 BGC", samples=_keydiff_samples)
def row_scores_keydiff(keys: Tensor, past: Tensor) -> Tensor:
    """Score by minus the cosine between a key and the mean direction of the keys.

    ``%s: f32[B,G,C] = graftwork.row_scores_keydiff(%kv.0.key, %past)``

    keys [B,G,C,D]; past i64[B] rows are valid. The mean is of valid keys, normalized to length 1;
    scores are in 1/1024. Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for
    Long-Context LLM Inference in Resource-Constrained Environments" (2025).
    """
    lengths = keys.float().pow(2).sum(-1, keepdim=True).clamp(min=LEAST).sqrt()
    directions = keys.float() / lengths
    valid = torch.arange(keys.shape[2], device=past.device)[None] < past[:, None]
    anchor = directions.masked_fill(~valid[:, None, :, None], 0.0).sum(2, keepdim=True)
    size = anchor.pow(2).sum(-1, keepdim=True).clamp(min=LEAST).sqrt()
    return -rounded((directions * (anchor / size)).sum(-1))


def _attention_samples() -> Iterator[Sample]:
    keys, past = torch.randn(2, 2, 9, 4), torch.tensor([8, 4])
    yield (torch.randn(2, 4, 5, 4), keys, past), {"block": 4, "last": 2, "scale": 0.5}
    yield (
        (torch.randn(2, 2, 4, 4), keys, past),
        {"block": 4, "last": 4, "scale": 1.0, "softcap": 2.0},
    )


def _check_last(given: Operands, block: int, last: int) -> None:
    if not 1 <= last <= block:
        raise InputError(f"{given.op}: expected 1 <= last <= block, got last={last}, block={block}")


@op(
    "queries: BHWD, keys: BGCD, past: i64 B, H % G -> f32 BGC",
    samples=_attention_samples,
    also=_check_last,
    native=Native("BHWDGC"),
)
def row_attention(
    queries: Tensor,
    keys: Tensor,
    past: Tensor,
    *,
    block: int,
    last: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention that rows receive from the last queries: mean over queries and a group's heads.

    ``%a: f32[B,G,C] = graftwork.row_attention(%q, %keys, %past, block=64, last=1, scale=0.5)``

    queries [B,H,W,D], W >= block: row i is the query of cache row past - block + i; the last `last`
    of the block are used. keys [B,G,C,D] as attention reads them; past i64[B], a multiple of block,
    rows are valid. scale, softcap as in `attend`. A query sees rows up to its own. Rows from past
    on get 0.
    """
    batch, groups, rows, _ = keys.shape
    heads = queries.shape[1]
    latest = torch.arange(block - last, block, device=past.device)
    asked = queries.index_select(2, latest).float()
    scores = torch.matmul(grouped(asked, groups), keys.float().transpose(2, 3)) * scale
    scores = capped(scores, softcap).reshape(batch, groups, heads // groups, last, rows)
    own = past[:, None] - last + torch.arange(last, device=past.device)
    seen = torch.arange(rows, device=past.device)[None, None] <= own[:, :, None]
    scores = scores.masked_fill(~seen[:, None, None], -1e30)
    weights = torch.softmax(scores, dim=-1).masked_fill(~seen[:, None, None], 0.0)
    return weights.sum((2, 3)) / (heads // groups * last)


def _ranked_samples() -> Iterator[Sample]:
    yield (torch.rand(2, 2, 9), torch.tensor([8, 4])), {}
    yield (torch.rand(2, 2, 9), torch.tensor([8, 4])), {"pool": 5, "recent": 2}


def _check_pool(given: Operands, pool: int, recent: int) -> None:
    if pool < 1 or pool % 2 == 0 or recent < 0:
        raise InputError(
            f"{given.op}: expected an odd pool and recent >= 0, got pool={pool}, recent={recent}"
        )


@op("attention: BGC, past: i64 B -> f32 attention", samples=_ranked_samples, also=_check_pool)
def row_scores_attention(
    attention: Tensor, past: Tensor, *, pool: int = 1, recent: int = 0
) -> Tensor:
    """Score by the logarithm of the attention that a row and its neighbours received.

    ``%s: f32[B,G,C] = graftwork.row_scores_attention(%a, %past, pool=5, recent=32)``

    attention f32[B,G,C] from `row_attention`, or sums of it; past i64[B] rows are valid. Averaged
    over `pool` rows around each; the last `recent` rows and rows outside count as 0. Scores are in
    1/1024 of a natural logarithm.
    """
    rows = attention.shape[2]
    counted = torch.arange(rows, device=past.device)[None] < past[:, None] - recent
    score = attention.float().masked_fill(~counted[:, None], 0.0)
    place = torch.arange(rows, device=past.device)
    total = score
    for offset in range(1, pool // 2 + 1):
        before = score.index_select(2, (place - offset).clamp(min=0))
        after = score.index_select(2, (place + offset).clamp(max=rows - 1))
        total = total + before.masked_fill(place < offset, 0.0)
        total = total + after.masked_fill(place >= rows - offset, 0.0)
    score = total / pool
    return rounded_log(score)


def _sums_samples() -> Iterator[Sample]:
    yield (torch.rand(3, 2, 9, 1), torch.rand(3, 2, 9), torch.tensor([8, 4, 0])), {"count": 4}


@op("sums: f32 BGC1, attention: BGC, past: i64 B -> sums", samples=_sums_samples)
def row_sums(sums: Tensor, attention: Tensor, past: Tensor, *, count: int) -> Tensor:
    """Accumulated attention of rows: the sums so far plus that of the last `count` queries.

    ``%t: f32[B,G,C,1] = graftwork.row_sums(%kv.0.sums, %a, %past, count=64)``

    sums f32[B,G,C,1]; attention f32[B,G,C], the mean over the last `count` queries; past i64[B]
    rows are valid, the last `count` of them new, with sum 0. A sequence with past 0 is unchanged.
    """
    place = torch.arange(sums.shape[2], device=past.device)
    known = place[None] < past[:, None] - count
    before = sums.masked_fill(~known[:, None, :, None], 0.0)
    total = before + attention.float()[..., None] * count
    return torch.where((past > 0)[:, None, None, None], total, sums)


def _top_samples() -> Iterator[Sample]:
    scores = torch.randint(-3, 3, (2, 2, 9)).float()
    yield (scores, torch.tensor([8, 5])), {"rows": 5, "full": 8, "sinks": 1, "recent": 2}
    yield (scores, torch.tensor([8, 9])), {"rows": 4, "full": 8, "sinks": 0, "recent": 0}


def _check_top(given: Operands, rows: int, full: int, sinks: int, recent: int) -> None:
    if not (sinks >= 0 and recent >= 0 and 1 <= rows < full and sinks + recent <= rows):
        raise InputError(
            f"{given.op}: expected sinks + recent <= rows < full, got sinks={sinks}, "
            f"recent={recent}, rows={rows}, full={full}"
        )


@op(
    "scores: f32 BGC, past: i64 B, K = rows -> i64 BGK",
    samples=_top_samples,
    also=_check_top,
    native=Native("BGCK"),
)
def keep_top(
    scores: Tensor, past: Tensor, *, rows: int, full: int, sinks: int, recent: int
) -> Tensor:
    """The rows that a full cache keeps: i64[B,G,rows], ascending.

    ``%k: i64[B,G,1024] = graftwork.keep_top(%s, %past, rows=1024, full=1088, sinks=4, recent=64)``

    scores f32[B,G,C], integers below 2^23, C >= rows; past i64[B] rows are valid. A sequence with
    `full` rows or more keeps its first `sinks` and last `recent` rows and those with the highest
    scores, ties to the later row. One with fewer keeps its first `rows` rows.
    """
    count = scores.shape[2]
    place = torch.arange(count, device=past.device)
    valid = place[None] < past[:, None]
    kept = (place[None] < sinks) | (place[None] >= past[:, None] - recent)
    # One integer per row orders by score, then by position.
    order = (scores.clamp(-(2.0**23), 2.0**23).to(I64) + 2**24) * count + place
    order = torch.where(kept[:, None], order + 2**26 * count, order)
    order = torch.where(valid[:, None], order, place - count)
    best = torch.topk(order, rows, dim=-1).indices
    ascending = torch.sort(best, dim=-1).values
    first = torch.arange(rows, device=past.device).expand(ascending.shape)
    return torch.where((past >= full)[:, None, None], ascending, first)


def _take_samples() -> Iterator[Sample]:
    rows = torch.tensor([[[0, 4], [1, 2]], [[2, 3], [0, 1]]])
    yield (torch.randn(2, 2, 5, 3), rows), {}
    yield (torch.randint(256, (2, 2, 5, 3), dtype=torch.uint8), rows), {}


@op("cache: float|u8 BGCD, rows: i64 BGK -> BGKD", samples=_take_samples)
def take_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Gather rows of a cache, by group of heads.

    ``%y: f32[B,G,K,D] = graftwork.take_rows(%kv.0.value, %k)``

    cache [B,G,C,D], floating or u8; rows i64[B,G,K], each below C.
    """
    return cache.gather(2, rows[..., None].expand(*rows.shape, cache.shape[3]))


def _turn_samples() -> Iterator[Sample]:
    angle = torch.arange(9)[:, None] * torch.tensor([1.0, 0.1])
    rows = torch.tensor([[[0, 1, 8], [2, 4, 5]]])
    for interleaved in (False, True):
        keys = torch.randn(1, 2, 3, 6)
        yield (keys, rows, angle.cos() * 1.2, angle.sin() * 1.2), {"interleaved": interleaved}


@op("keys: BGKD, rows: i64 BGK, cos: PR, sin: PR -> keys", samples=_turn_samples, also=check_tables)
def turn_rows(
    keys: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Rotate keys from positions `rows` to positions 0, 1, 2, ...

    ``%y: f32[B,G,K,D] = graftwork.turn_rows(%x, %k, @cos, @sin)``

    keys [B,G,K,D] after `rotary` with row p of the tables cos, sin [P,R] for position p; rows
    i64[B,G,K], each below P; K <= P. Tables may be scaled: norms do not change, nor does a key that
    keeps its position.
    """
    count, cos, sin = keys.shape[2], cos.float(), sin.float()
    return turned_on(keys, (cos[rows], sin[rows]), (cos[:count], sin[:count]), interleaved)
