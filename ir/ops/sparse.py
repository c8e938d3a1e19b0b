"""Sparse attention: selection of cache rows per token, and attention over them.

Each token selects by its own queries, so it reads the same rows when decoded alone, in a prompt's
chunk and in a draft. As in `eviction`, scores are rounded and ties go to the later row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .attention import _scores, _weighted, capped, grouped
from .eviction import STEPS
from .operands import Operands
from .quantized_cache import check_stored, quantize_rows, stored_values

I64 = torch.int64
MOST = 4095.0
"""Scores beyond it on either side count as it."""


def _channel_samples() -> Iterator[Sample]:
    channels = torch.tensor([[0, 5], [7, 2]])
    yield (torch.randn(2, 4, 3, 8), channels), {}
    yield (torch.randn(2, 2, 3, 8), channels), {}


@op(
    "x: BHTD, channels: i64 GR, H % G -> BHTR",
    samples=_channel_samples,
    native=Native("BHGTDR", cast="x"),
)
def take_channels(x: Tensor, channels: Tensor) -> Tensor:
    """Gather channels of queries or keys, by group of heads.

    ``%l: f32[B,G,T,8] = graftwork.take_channels(%k, @kv.0.channels)``

    x [B,H,T,D], H a multiple of G; channels i64[G,R], each below D -> [B,H,T,R].
    """
    batch, heads, width, _ = x.shape
    groups, count = channels.shape
    rows = grouped(x, groups)
    index = channels[None, :, None, :].expand(*rows.shape[:3], count)
    return rows.gather(3, index).reshape(batch, heads, width, count)


def _top_samples() -> Iterator[Sample]:
    mask = torch.rand(2, 1, 3, 9) < 0.6
    mask[..., 0] = True
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8)
    yield (q, k, mask), {"rows": 4, "picks": 4, "scale": 0.3}
    yield (q, k, mask), {"rows": 4, "picks": 2, "scale": 0.3}
    yield (q, k, mask), {"rows": 12, "picks": 2, "scale": 0.3, "softcap": 2.0}


@op(
    "q: BHTD, k: BGCD, mask: bool B1TC, R = picks, H >= 1, H % R, R % G, rows >= 1, "
    "N = rows -> i64 BRTN",
    samples=_top_samples,
    native=Native("BHGRTCDN", cast="q k"),
)
def top_rows(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    *,
    rows: int,
    picks: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The rows with the highest attention of each token, by heads: i64[B,picks,T,rows], ascending.

    ``%r: i64[B,3,T,256] = graftwork.top_rows(%q, %keys, %m, rows=256, picks=3, scale=0.125)``

    q [B,H,T,D] and k [B,G,C,D], or some channels of both; mask, scale, softcap as in `attend`.
    H/picks consecutive heads of a group pick together (picks is between G and H): by the largest
    share of attention that one of them gives a row, as its logarithm; a head alone by its scores.
    These are in 1/1024 and bounded to 4,095 on both sides, ties in favour of the later row. If a
    token sees fewer than `rows` rows, the rest are -1.
    """
    return _first(_together(_products(q, k, scale, softcap), mask, picks), mask, rows)


def _labelled_samples() -> Iterator[Sample]:
    mask = torch.rand(2, 1, 3, 9) < 0.6
    mask[..., 0] = True
    codes, steps = quantize_rows(torch.randn(2, 2, 9, 8), bits=4, turned=False)
    of = torch.randn(2, 4, 3, 8), codes, steps, mask
    yield of, {"bits": 4, "rows": 4, "picks": 4, "scale": 0.3}
    yield of, {"bits": 4, "rows": 4, "picks": 2, "scale": 0.3}


def _check_labels(given: Operands, bits: int) -> None:
    check_stored(given.op, given.sizes["D"], bits, turned=False)


@op(
    "q: BHTD, K = D * bits // 8, codes: u8 BGCK, S = 2, steps: f32 BGCS, mask: bool B1TC, "
    "R = picks, H >= 1, H % R, R % G, rows >= 1, N = rows -> i64 BRTN",
    samples=_labelled_samples,
    also=_check_labels,
    native=Native("BHGRTCDKN", cast="q"),
)
def top_stored_rows(
    q: Tensor,
    codes: Tensor,
    steps: Tensor,
    mask: Tensor,
    *,
    bits: int,
    rows: int,
    picks: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`top_rows` of keys in few bits.

    ``%r: i64[B,3,T,256] = graftwork.top_stored_rows(%q, %codes, %steps, %m, bits=4, rows=256,
    picks=3, scale=0.125)``

    codes u8[B,G,C,D*bits/8] and steps f32[B,G,C,2], see `quantize_rows`; q, mask, rows, picks,
    scale and softcap as in `top_rows`.
    """
    scores = _products(q, stored_values(codes, steps, bits), scale, softcap)
    return _first(_together(scores, mask, picks), mask, rows)


def _products(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores f32[B,H,T,C]."""
    batch, heads, width, _ = q.shape
    queries = grouped(q.float(), k.shape[1])
    # Products by cache rows: the smaller operand, not the keys, is transposed.
    scores = torch.matmul(k.float(), queries.transpose(2, 3)).transpose(2, 3) * scale
    return capped(scores.reshape(batch, heads, width, k.shape[2]), softcap)


def _together(scores: Tensor, mask: Tensor, picks: int) -> Tensor:
    """Scores of heads f32[B,H,T,C] as those of heads that pick together, f32[B,picks,T,C], where
    mask, bool [B,1,T,C], shows rows: see `top_rows`."""
    if scores.shape[1] == picks:
        return scores
    shares = scores.masked_fill(~mask, -1e30).log_softmax(-1)
    batch, heads, *rest = shares.shape
    return shares.reshape(batch, picks, heads // picks, *rest).amax(2)


def _first(scores: Tensor, mask: Tensor, rows: int) -> Tensor:
    """The rows with the highest scores f32[B,R,T,C]: i64[B,R,T,rows], see `top_rows`."""
    capacity = scores.shape[3]
    bounded = scores.clamp(min=-MOST, max=MOST)
    ranked = torch.round(bounded * STEPS).to(I64) + 2**23
    place = torch.arange(capacity, device=scores.device)
    order = torch.where(mask, ranked * capacity + place, torch.full_like(place, -1))
    # At least `rows` candidates.
    order = torch.cat([order, order.new_full((*order.shape[:3], rows), -1)], dim=-1)
    best, index = torch.topk(order, rows, dim=-1)
    # Missing ones behind all others.
    last = torch.where(best >= 0, index, torch.full_like(index, capacity))
    rising = -torch.topk(-last, rows, dim=-1).values
    return torch.where(rising < capacity, rising, torch.full_like(rising, -1))


def _attend_samples() -> Iterator[Sample]:
    rows = torch.tensor([4, 0, 7, -1]).expand(2, 2, 3, 4)
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    yield (q, k, v, rows), {"scale": 0.3}
    yield (q, k, v, rows.repeat(1, 2, 1, 1)), {"scale": 0.3}
    yield (q, k, v, rows, torch.randn(4)), {"scale": 0.3, "softcap": 4.0}


@op(
    "q: BHTD, k: BGCD, v: BGCE, rows: i64 BRTK, sinks: H, R % G, H % R, T >= 1, C >= 1, K >= 1 "
    "-> BHTE",
    samples=_attend_samples,
    native=Native("BHGRTCDEK", cast="sinks"),
)
def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`attend` of each token over its selected rows; no other row is read.

    ``%y: f32[B,H,T,E] = graftwork.attend_rows(%q, %keys, %values, %r, scale=0.125)``

    q [B,H,T,D]; k [B,G,C,D] and v [B,G,C,E]; rows i64[B,R,T,K]: distinct, below C, or -1 for none,
    at least one per token. H/R consecutive heads of a group share rows (R is between G and H).
    scale, sinks, softcap as in `attend`.
    """
    batch, heads, width, dim = q.shape
    groups, capacity, wide = k.shape[1], k.shape[2], v.shape[3]
    picks, count = rows.shape[1], rows.shape[3]
    each = heads // picks
    first = torch.arange(batch * groups, device=k.device) * capacity
    first = first.reshape(batch, groups, 1).expand(batch, groups, picks // groups)
    flat = (rows.clamp(min=0) + first.reshape(batch, picks, 1, 1)).reshape(-1)
    # Each token becomes a sequence of its own with its rows as the cache.
    shape = batch, picks * width, count
    keys, values = (
        cache.reshape(batch * groups * capacity, size)
        .index_select(0, flat)
        .reshape(*shape, size)
        .to(q.dtype)
        for cache, size in ((k, dim), (v, wide))
    )
    queries = q.reshape(batch, picks, each, width, dim).transpose(2, 3)
    queries = queries.reshape(batch, picks * width * each, 1, dim)
    scores = _scores(queries, keys, scale, softcap)
    picked = (rows >= 0).reshape(batch, picks * width, 1, count).expand(*shape[:2], each, count)
    own = None
    if sinks is not None:
        own = sinks.reshape(1, picks, 1, each).expand(1, picks, width, each).reshape(-1)
    picked = picked.reshape(batch, picks * width * each, 1, count)
    out = _weighted(scores, values, picked, own, q.dtype)
    out = out.reshape(batch, picks, width, each, wide).transpose(2, 3)
    return out.reshape(batch, heads, width, wide)


def _means_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 2, 9, 4), torch.tensor([8, 4])), {"block": 4, "chunk": 2}


def _check_means(given: Operands, block: int, chunk: int) -> None:
    if chunk < 1 or block % chunk:
        raise InputError(f"{given.op}: block={block} is no multiple of chunk={chunk}")
    given.sizes["S"] = block // chunk


@op("keys: BGCD, past: i64 B -> f32 BGSD", samples=_means_samples, also=_check_means)
def chunk_means(keys: Tensor, past: Tensor, *, block: int, chunk: int) -> Tensor:
    """The mean of each `chunk` of the last `block` keys.

    ``%n: f32[B,G,8,D] = graftwork.chunk_means(%kv.0.key, %past, block=64, chunk=8)``

    keys [B,G,C,D]; past i64[B] rows are valid, a multiple of block; undefined for 0. Source: Sun et
    al., "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference" (2024),
    landmarks of chunks.
    """
    place = torch.arange(block, device=past.device)
    index = (past[:, None] - block + place).clamp(min=0)[:, None, :, None]
    batch, groups, _, dim = keys.shape
    rows = keys.gather(2, index.expand(batch, groups, block, dim)).float()
    return rows.reshape(batch, groups, block // chunk, chunk, dim).mean(3)


def _chunk_samples() -> Iterator[Sample]:
    past = torch.tensor([8, 5])
    place = torch.arange(14)
    mask = place <= past[:, None, None, None] + torch.arange(3)[:, None]
    q, marks = torch.randn(2, 4, 3, 6), torch.randn(2, 2, 7, 6)
    how = {"chunk": 2, "block": 4, "latest": 5, "scale": 0.3}
    yield (q, marks, mask, past), {"chunks": 2, **how}
    yield (q, marks, mask, past), {"chunks": 9, **how, "softcap": 2.0}


def _check_chunks(given: Operands, chunks: int, chunk: int, block: int, latest: int) -> None:
    if min(chunks, chunk) < 1 or block % chunk or latest < block:
        raise InputError(
            f"{given.op}: expected chunks >= 1, block a multiple of chunk and latest >= block, got "
            f"chunks={chunks}, chunk={chunk}, block={block}, latest={latest}"
        )


@op(
    "q: BHTD, marks: BGSD, mask: bool B1TC, past: i64 B, H % G, W = chunks * chunk + latest -> "
    "i64 BGTW",
    samples=_chunk_samples,
    also=_check_chunks,
    native=Native("BHGTCSDW", cast="q marks"),
)
def chunk_rows(
    q: Tensor,
    marks: Tensor,
    mask: Tensor,
    past: Tensor,
    *,
    chunks: int,
    chunk: int,
    block: int,
    latest: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Rows of the chunks whose landmarks get the highest attention of each token, and the `latest`
    rows since the last whole block: i64[B,G,T,chunks*chunk+latest].

    ``%r: i64[B,G,T,320] = graftwork.chunk_rows(%q, %marks, %m, %past, chunks=32, chunk=8, block=64,
    latest=64, scale=0.125)``

    q [B,H,T,D]; marks [B,G,S,D], valid for whole blocks of past; mask, scale, softcap as in
    `attend`; tokens see all rows of whole blocks; past i64[B]. Chunks are ranked as rows in
    `top_rows`, by the maximum over a group's heads. Missing and hidden rows are -1.
    """
    batch, groups, count, _ = marks.shape
    begin = past - torch.remainder(past, block)
    whole = torch.div(begin, chunk, rounding_mode="floor")
    known = torch.arange(count, device=past.device)[None] < whole[:, None]
    seen = known[:, None, None].expand(batch, 1, q.shape[2], count)
    scores = _products(q, marks, scale, softcap).masked_fill(~seen, -1e30)
    logs = scores.log_softmax(-1).unflatten(1, (groups, -1)).amax(2)
    best = _first(logs, seen, chunks)
    inside = torch.arange(chunk, device=past.device)
    rows = best[..., None] * chunk + inside
    rows = torch.where(best[..., None] >= 0, rows, torch.full_like(rows, -1)).flatten(3)
    behind = begin[:, None] + torch.arange(latest, device=past.device)
    there = behind.clamp(max=mask.shape[3] - 1)[:, None, None].expand(batch, 1, q.shape[2], latest)
    sees = mask.gather(3, there) & (behind < mask.shape[3])[:, None, None]
    near = torch.where(sees, there, torch.full_like(there, -1))
    return torch.cat([rows, near.expand(batch, groups, q.shape[2], latest)], dim=-1)
