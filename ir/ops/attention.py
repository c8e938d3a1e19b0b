"""Attention, before and after a KV cache exists, and the masks and biases that it needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Native, Sample, op
from .operands import Operands

SPANS = ("window", "chunk")
"""Options of `attention` and `step_mask` that limit how far back a token sees; None: no limit."""


def within_reach(
    mask: Tensor, own: Tensor, other: Tensor, window: int | None, chunk: int | None
) -> Tensor:
    """A mask limited by window and chunk, see `attention`. own, other: positions of queries and of
    keys."""
    if window is not None:
        mask = mask & (own - other < window)
    if chunk is not None:
        mask = mask & (other >= own - own % chunk)
    return mask


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scaled dot products [B,H,T,N] in float32 of q [B,H,T,D] with the grouped keys k [B,G,N,D]."""
    batch, heads, width, _ = q.shape
    scores = torch.matmul(grouped(q, k.shape[1]), k.transpose(2, 3)).float() * scale
    return capped(scores.reshape(batch, heads, width, k.shape[2]), softcap)


def grouped(x: Tensor, groups: int) -> Tensor:
    """Rows of a group's heads, concatenated: [B,H,T,D] -> [B,G,H/G*T,D]."""
    batch, heads, width, dim = x.shape
    return x.reshape(batch, groups, heads // groups * width, dim)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores bounded to -softcap..softcap; None: unchanged."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _weighted(
    scores: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """softmax(scores) v over the visible rows; sinks add to the softmax's denominator only."""
    batch, heads, width, _ = scores.shape
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.float().reshape(1, heads, 1, 1).expand(batch, heads, width, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    found = torch.matmul(grouped(weights.to(dtype), v.shape[1]), v)
    return found.reshape(batch, heads, width, v.shape[3])


def _attention_samples() -> Iterator[Sample]:
    kinds: tuple[tuple[int, int, dict[str, object]], ...]
    kinds = ((4, 2, {}), (2, 2, {"window": 3}), (2, 1, {"softcap": 5.0}), (2, 2, {"chunk": 2}))
    for heads, groups, extra in kinds:
        q = torch.randn(2, heads, 5, 8)
        k, v = torch.randn(2, groups, 5, 8), torch.randn(2, groups, 5, 6)
        yield (q, k, v), {"layer": 0, "scale": 8**-0.5, **extra}
    qkv = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    yield qkv, {"sinks": torch.randn(2), "slopes": torch.rand(2), "layer": 1, "scale": 0.5}
    yield qkv, {"distances": torch.randn(2, 7), "layer": 1, "scale": 1.0}


def by_distance(table: Tensor, distance: Tensor) -> Tensor:
    """Look up key position - query position i64[...], clamped to -R..R, in a table [H,2R+1]:
    f32[...,H]."""
    reach = table.shape[1] // 2
    place = distance.clamp(-reach, reach) + reach
    return torch.nn.functional.embedding(place, table.float().t())


def check_distances(given: Operands, distances: Tensor | None) -> None:
    """Errors: `InputError` unless the table is [H,2R+1]."""
    if distances is not None and distances.shape[1] % 2 == 0:
        given.refuse("distances", distances, ("H", "2R+1"))


@op(
    "q: BHTD, k: BGTD, v: BGTE, H % G, sinks: H, slopes: H, distances: HP -> BHTE",
    samples=_attention_samples,
    also=check_distances,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    distances: Tensor | None = None,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Causal self-attention over a whole sequence, as frontends produce it, without a cache.

    ``%y: f32[B,H,T,E] = graftwork.attention(%q, %k, %v, layer=0, scale=0.125)``

    q [B,H,T,D]; k [B,G,T,D]; v [B,G,T,E], H a multiple of G (grouped-query attention). Token t sees
    tokens max(0, t - window + 1) .. t; with `chunk` only those from t - t % chunk on (Llama 4).
    softcap c: scores become c tanh(s/c). sinks [H]: a logit per head in the softmax's denominator.
    slopes [H]: adds slope * (j - i) to score (i, j) (ALiBi). distances [H,2R+1]: adds
    distances[h, clamp(j - i, -R, R) + R] (T5). layer: the owner of the cache.
    """
    width = q.shape[2]
    steps = torch.arange(width, device=q.device)
    distance = steps[:, None] - steps[None, :]
    mask = within_reach(distance >= 0, steps[:, None], steps[None, :], window, chunk)
    scores = _scores(q, k.to(q.dtype), scale, softcap)
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * distance
    if distances is not None:
        scores = scores + by_distance(distances, -distance).permute(2, 0, 1)
    return _weighted(scores, v.to(q.dtype), mask[None, None], sinks, q.dtype)


def _write_samples() -> Iterator[Sample]:
    yield (torch.zeros(2, 2, 9, 4), torch.randn(2, 2, 3, 4), torch.tensor([0, 5])), {}
    codes = torch.randint(256, (2, 2, 3, 4), dtype=torch.uint8)
    yield (torch.zeros(2, 2, 9, 4, dtype=torch.uint8), codes, torch.tensor([0, 5])), {}


@op("cache: float|u8 BGCD, new: float|u8 BGTD, past: i64 B -> cache", samples=_write_samples)
def cache_write(cache: Tensor, new: Tensor, past: Tensor) -> Tensor:
    """The cache with a step's rows appended after each sequence's `past` valid rows.

    ``%keys: f32[B,G,C,D] = graftwork.cache_write(%kv.0.key, %k, %past)``

    cache [B,G,C,D]; new [B,G,T,D], both floating or both u8; past i64[B], past + T <= C (reserved
    by the caller). Rows from past + T on are invalid; `step_mask` hides them.
    """
    width = new.shape[2]
    rows = past[:, None] + torch.arange(width, device=past.device)
    index = rows[:, None, :, None].expand(new.shape)
    return cache.scatter(2, index, new.to(cache.dtype))


def _mask_samples() -> Iterator[Sample]:
    positions = torch.tensor([[2, 3, 4], [5, 6, 7]])
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(2, 3, 3)
    yield (torch.tensor([2, 5]), positions, None, 9), {}
    yield (torch.tensor([2, 5]), positions, None, 9), {"window": 4}
    yield (torch.tensor([2, 5]), positions, None, 9), {"chunk": 3}
    yield (torch.tensor([2, 5]), torch.tensor([[2, 3, 3], [5, 6, 6]]), tree, 9), {"window": 2}
    held = torch.tensor([[0, 7, 9, 9, 9, 9, 9, 9, 9], [0, 1, 6, 7, 8, 9, 9, 9, 9]])
    later = torch.tensor([[8, 9, 10], [9, 10, 11]])
    yield (torch.tensor([2, 5]), later, None, 9, held), {"window": 4}
    yield (torch.tensor([2, 5]), later, tree, 9, held), {"window": 4, "chunk": 4}


def held_positions(
    past: Tensor, positions: Tensor, capacity: int, row_positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """By row: its position after a step, i64[B,C]; whether the step writes it, bool[B,C]; and the
    token that does, i64[B,C]. positions i64[B,T]; row_positions: before the step; None: row r has
    position r."""
    width = positions.shape[1]
    rows = torch.arange(capacity, device=past.device)
    offset = rows[None, :] - past[:, None]
    inside = (offset >= 0) & (offset < width)
    token = offset.clamp(0, width - 1)
    before = rows[None, :] if row_positions is None else row_positions
    return torch.where(inside, positions.gather(1, token), before), inside, token


@op(
    "past: i64 B, positions: i64 BT, ancestors: bool BTT, C = capacity, row_positions: i64 BC "
    "-> bool B1TC",
    samples=_mask_samples,
)
def step_mask(
    past: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    capacity: int,
    row_positions: Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Which cache rows each token of a step may see.

    ``%m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C, window=4096)``

    past i64[B] valid rows before the step; positions i64[B,T] of the tokens; ancestors bool[B,T,T]
    (row t: token t and its ancestors in the step, topological order) or None for a chain, where
    token t sees tokens 0..t. Row past + i holds token i of the step; row r < past holds position
    row_positions[b,r] of i64[B,C], or r if that is None. `window` hides rows `window` or more
    positions before the token, `chunk` those before the token's chunk.
    """
    width = positions.shape[1]
    offset = torch.arange(capacity, device=past.device)[None, :] - past[:, None]
    held, inside, token = held_positions(past, positions, capacity, row_positions)
    if ancestors is None:
        fresh = token[:, None, :] <= torch.arange(width, device=past.device)[None, :, None]
    else:
        fresh = ancestors.gather(2, token[:, None, :].expand(-1, width, -1))
    mask = torch.where(inside[:, None, :], fresh, (offset < 0)[:, None, :])
    mask = within_reach(mask, positions[:, :, None], held[:, None, :], window, chunk)
    return mask[:, None]


def _alibi_samples() -> Iterator[Sample]:
    slopes, past, positions = (
        torch.rand(4),
        torch.tensor([2, 5]),
        torch.tensor([[2, 3, 3], [5, 6, 7]]),
    )
    yield (slopes, past, positions, 9), {}
    yield (slopes, past, positions + 4, 9, torch.arange(18).reshape(2, 9) // 2), {}


@op(
    "slopes: H, past: i64 B, positions: i64 BT, C = capacity, row_positions: i64 BC -> f32 BHTC",
    samples=_alibi_samples,
)
def alibi(
    slopes: Tensor,
    past: Tensor,
    positions: Tensor,
    capacity: int,
    row_positions: Tensor | None = None,
) -> Tensor:
    """ALiBi's additive score bias over cache rows: slope * (row position - token position).

    ``%b: f32[B,H,T,C] = graftwork.alibi(@slopes, %past, %positions, C)``

    slopes [H]; past i64[B]; positions i64[B,T]; row_positions i64[B,C] as in `step_mask`.
    Source: Press et al., "Train Short, Test Long" (2021).
    """
    held, _, _ = held_positions(past, positions, capacity, row_positions)
    distance = (held[:, None, :] - positions[:, :, None]).float()
    return slopes.float()[None, :, None, None] * distance[:, None]


def _attend_samples() -> Iterator[Sample]:
    mask = torch.rand(2, 1, 3, 9) < 0.5
    mask[..., 0] = True
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    yield (q, k, v, mask), {"scale": 0.3}
    yield (q, k, v, mask), {"scale": 0.3, "softcap": 4.0, "sinks": torch.randn(4)}
    yield (q, k, v, mask), {"scale": 0.3, "bias": torch.randn(2, 4, 3, 9)}


ATTEND = "q: BHTD, k: BGCD, v: BGCE, mask: bool B1TC, bias: BHTC, sinks: H, H % G, C >= 1"
"""Declaration of the operands of attention."""

ATTENTION = Native("BHGTCDE", cast="bias sinks")


@op(f"{ATTEND} -> BHTE", samples=_attend_samples, native=ATTENTION)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of a step's tokens over cache rows.

    ``%y: f32[B,H,T,E] = graftwork.attend(%q, %keys, %values, %m, scale=0.125)``

    q [B,H,T,D]; k [B,G,C,D] and v [B,G,C,E] caches that already hold the step's rows; mask
    bool[B,1,T,C] (`step_mask`), at least one row visible to every token; bias [B,H,T,C] is added to
    the scores; sinks, softcap as in `attention`. Hidden rows have no influence.
    """
    if sinks is None and softcap is None and q.shape[3] == v.shape[3]:
        extra = mask if bias is None else bias.masked_fill(~mask, float("-inf")).to(q.dtype)
        fewer = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), attn_mask=extra, scale=scale, enable_gqa=fewer
        )
    scores = _scores(q, k.to(q.dtype), scale, softcap)
    if bias is not None:
        scores = scores + bias
    return _weighted(scores, v.to(q.dtype), mask, sinks, q.dtype)
