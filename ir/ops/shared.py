"""Attention over a cache in parts, and rows that all sequences of a batch share.

Softmax over parts is the parts' results weighted by their sums of exponentials, so rows in several
buffers count as one cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Native, Sample, op
from .attention import ATTEND, ATTENTION, _scores, grouped, within_reach

LEAST = -1e30
"""Stands for -infinity, to avoid -infinity - -infinity."""


def _parts_samples() -> Iterator[Sample]:
    mask = torch.rand(2, 1, 3, 9) < 0.5
    mask[0, :, 1] = False
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    yield (q, k, v, mask), {"scale": 0.3}
    yield (q, k, v, mask, None, torch.randn(4)), {"scale": 0.3, "softcap": 4.0}
    yield (q, k, v, mask, torch.randn(2, 4, 3, 9)), {"scale": 0.3}


@op(f"{ATTEND} -> BHTE, f32 BHT", samples=_parts_samples, native=ATTENTION)
def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` over a part of the rows, and the part's log-sum-exp.

    ``%p: (f32[B,H,T,E], f32[B,H,T]) = graftwork.attend_part(%q, %keys, %values, %m, scale=0.125)``

    q [B,H,T,D]; k [B,G,C,D]; v [B,G,C,E]; mask bool[B,1,T,C]; bias [B,H,T,C]; sinks [H]; as in
    `attend`, but a token may see no row. The second result, the weight for `merge_parts`, is the
    log-sum-exp of the scores that a token sees, its sink included: -infinity for a token that sees
    nothing, whose first result is 0.
    """
    batch, heads, width, _ = q.shape
    scores = _scores(q, k.to(q.dtype), scale, softcap)
    scores = (scores if bias is None else scores + bias).masked_fill(~mask, float("-inf"))
    most = scores.amax(-1, keepdim=True).clamp(min=LEAST)
    if sinks is not None:
        sink = sinks.float().reshape(1, heads, 1, 1)
        most = torch.maximum(most, sink)
    weights = torch.exp(scores - most)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - most)
    weights = (weights / total.clamp(min=1e-30)).to(q.dtype)
    out = torch.matmul(grouped(weights, v.shape[1]), v.to(q.dtype))
    return out.reshape(batch, heads, width, v.shape[3]), (most + total.log()).squeeze(-1)


def _merge_samples() -> Iterator[Sample]:
    none = torch.full((2, 4, 3), float("-inf"))
    parts = torch.randn(2, 4, 3, 6), torch.randn(2, 4, 3), torch.randn(2, 4, 3, 6)
    yield (*parts, torch.randn(2, 4, 3)), {}
    yield (*parts, none), {}


@op(
    "a: BHTE, a_weight: f32 BHT, b: BHTE, b_weight: f32 BHT -> BHTE",
    samples=_merge_samples,
    native=Native("BHTE"),
)
def merge_parts(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
    """Attention over the rows of two parts together.

    ``%y: f32[B,H,T,E] = graftwork.merge_parts(%p.0, %p.1, %r.0, %r.1)``

    a, b [B,H,T,E] and a_weight, b_weight f32[B,H,T] from `attend_part`; 0 if both weights are
    -infinity. Source: Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared
    Prefixes" (2024).
    """
    most = torch.maximum(a_weight, b_weight).clamp(min=LEAST)
    mine, other = torch.exp(a_weight - most), torch.exp(b_weight - most)
    total = (mine + other).clamp(min=1e-30)
    of_a, of_b = (mine / total).unsqueeze(-1), (other / total).unsqueeze(-1)
    return (a.float() * of_a + b.float() * of_b).to(a.dtype)


def _seen_samples() -> Iterator[Sample]:
    positions = torch.tensor([[5, 6, 7], [5, 6, 6]])
    yield (torch.tensor([4, 0, 0, 0, 0, 0]), positions), {}
    yield (torch.tensor([4, 0, 0, 0, 0, 0]), positions), {"window": 4}
    yield (torch.tensor([4, 0, 0, 0, 0, 0]), positions), {"chunk": 3}
    yield (torch.tensor([0, 9, 9]), positions), {}


@op("held: i64 S, positions: i64 BT, N = B * T -> bool 11NS", samples=_seen_samples)
def shared_mask(
    held: Tensor, positions: Tensor, *, window: int | None = None, chunk: int | None = None
) -> Tensor:
    """Which shared rows the tokens of a batch see, sequences concatenated.

    ``%m: bool[1,1,B*T,S] = graftwork.shared_mask(%shared.held, %positions)``

    held i64[S]: held[0] is the number of valid rows, which have the positions 0, 1, ...; positions
    i64[B,T] of the tokens, all later. `window` and `chunk` hide rows as in `step_mask`.
    """
    rows = torch.arange(held.shape[0], device=held.device)
    flat = positions.reshape(-1, 1)
    there = (rows < held[:1]).expand(flat.shape[0], held.shape[0])
    return within_reach(there, flat, rows, window, chunk)[None, None]


def _behind_samples() -> Iterator[Sample]:
    yield (torch.tensor([4, 0, 0]), torch.tensor([2, 5]), 9), {}


@op("held: i64 S, past: i64 B, C = capacity -> BC", samples=_behind_samples)
def positions_behind(held: Tensor, past: Tensor, capacity: int) -> Tensor:
    """Positions of sequences' own rows, which follow the shared ones.

    ``%r: i64[B,C] = graftwork.positions_behind(%shared.held, %past, C)``

    held i64[S] as in `shared_mask`; past i64[B].
    """
    rows = torch.arange(capacity, device=past.device) + held[:1]
    return rows[None].expand(past.shape[0], capacity)
