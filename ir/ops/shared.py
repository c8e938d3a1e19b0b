"""Attention over a cache in parts, and rows that all sequences of a batch have in common.

Softmax over parts is what each part gives, weighed by the sum of the exponentials of its scores: so
rows that lie in several places, or are read at different times, count as one cache's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, define
from .attention import _scores, check_attend, within_reach
from .operands import Operands

I64 = torch.int64
LEAST = -1e30
"""Stands for minus infinity where that would be taken from itself."""


def _parts_samples() -> Iterator[Sample]:
    mask = torch.rand(2, 1, 3, 9) < 0.5
    mask[0, :, 1] = False
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    yield (q, k, v, mask), {"scale": 0.3}
    yield (q, k, v, mask, None, torch.randn(4)), {"scale": 0.3, "softcap": 4.0}
    yield (q, k, v, mask, torch.randn(2, 4, 3, 9)), {"scale": 0.3}


def _parts_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    check_attend(q, k, v, mask, bias, sinks)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@define(
    "attend_part(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? bias=None, "
    "Tensor? sinks=None, *, float scale, float? softcap=None) -> (Tensor, Tensor)",
    samples=_parts_samples,
    fake=_parts_fake,
)
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
    """`attend` over some of the rows that tokens see, and how much these weigh.

    ``%p: (f32[B,H,T,E], f32[B,H,T]) = graftwork.attend_part(%q, %keys, %values, %m, scale=0.125)``

    q [B,H,T,D]; k [B,G,C,D]; v [B,G,C,E]; mask bool[B,1,T,C]; bias [B,H,T,C]; sinks [H]; as those
    of `attend`, but that a token may see no row. The second result is the
    logarithm of the sum of the exponentials of the scores that a token sees, its sink's among them:
    what `merge_parts` weighs the first one by. Of a token that sees no row it is -infinity, and the
    first is 0. Errors: `InputError` naming an operand of another rank, size or dtype.
    """
    check_attend(q, k, v, mask, bias, sinks)
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
    groups = v.shape[1]
    grouped = weights.reshape(batch, groups, heads // groups * width, v.shape[2])
    out = torch.matmul(grouped, v.to(q.dtype)).reshape(batch, heads, width, v.shape[3])
    return out, (most + total.log()).squeeze(-1)


def _merge_samples() -> Iterator[Sample]:
    none = torch.full((2, 4, 3), float("-inf"))
    parts = torch.randn(2, 4, 3, 6), torch.randn(2, 4, 3), torch.randn(2, 4, 3, 6)
    yield (*parts, torch.randn(2, 4, 3)), {}
    yield (*parts, none), {}


def check_merge(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> None:
    """Whether `merge_parts` takes these operands. Errors: `InputError` naming what does not fit."""
    given = Operands("merge_parts")
    given.fit("a", a, "BHTE")
    given.fit("a_weight", a_weight, "BHT", torch.float32)
    given.fit("b", b, "BHTE", a.dtype)
    given.fit("b_weight", b_weight, "BHT", torch.float32)


def _merge_fake(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
    check_merge(a, a_weight, b, b_weight)
    return torch.empty_like(a)


@define(
    "merge_parts(Tensor a, Tensor a_weight, Tensor b, Tensor b_weight) -> Tensor",
    samples=_merge_samples,
    fake=_merge_fake,
)
def merge_parts(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
    """Attention over the rows of two parts together.

    ``%y: f32[B,H,T,E] = graftwork.merge_parts(%p.0, %p.1, %r.0, %r.1)``

    a, b [B,H,T,E] and a_weight, b_weight f32[B,H,T] as `attend_part` gives them; a token whose
    weights are both -infinity gets 0. Source: Juravsky et al., "Hydragen: High-Throughput LLM
    Inference with Shared Prefixes" (2024).
    """
    check_merge(a, a_weight, b, b_weight)
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


def _seen_fake(held: Tensor, positions: Tensor, **span: int | None) -> Tensor:
    given = Operands("shared_mask")
    given.fit("held", held, "S", I64)
    given.fit("positions", positions, "BT", I64)
    batch, width = positions.shape
    return positions.new_empty((1, 1, batch * width, held.shape[0]), dtype=torch.bool)


@define(
    "shared_mask(Tensor held, Tensor positions, *, int? window=None, int? chunk=None) -> Tensor",
    samples=_seen_samples,
    fake=_seen_fake,
)
def shared_mask(
    held: Tensor, positions: Tensor, *, window: int | None = None, chunk: int | None = None
) -> Tensor:
    """Which of the rows that a batch shares its tokens see, one sequence after the other.

    ``%m: bool[1,1,B*T,S] = graftwork.shared_mask(%shared.held, %positions)``

    held i64[S]: its first number says how many of the rows are there, those of the first so many
    positions; positions i64[B,T] of the tokens, all behind these. `window` and `chunk` hide
    rows as in `step_mask`.
    """
    _seen_fake(held, positions)
    rows = torch.arange(held.shape[0], device=held.device)
    flat = positions.reshape(-1, 1)
    there = (rows < held[:1]).expand(flat.shape[0], held.shape[0])
    return within_reach(there, flat, rows, window, chunk)[None, None]


def _behind_samples() -> Iterator[Sample]:
    yield (torch.tensor([4, 0, 0]), torch.tensor([2, 5]), 9), {}


def _behind_fake(held: Tensor, past: Tensor, capacity: int) -> Tensor:
    given = Operands("positions_behind")
    given.fit("held", held, "S", I64)
    given.fit("past", past, "B", I64)
    return past.new_empty((past.shape[0], capacity))


@define(
    "positions_behind(Tensor held, Tensor past, SymInt capacity) -> Tensor",
    samples=_behind_samples,
    fake=_behind_fake,
)
def positions_behind(held: Tensor, past: Tensor, capacity: int) -> Tensor:
    """The positions of sequences' own rows, where they begin behind what a batch shares.

    ``%r: i64[B,C] = graftwork.positions_behind(%shared.held, %past, C)``

    held i64[S] as in `shared_mask`; past i64[B].
    """
    _behind_fake(held, past, capacity)
    rows = torch.arange(capacity, device=past.device) + held[:1]
    return rows[None].expand(past.shape[0], capacity)
