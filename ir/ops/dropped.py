"""A state of fixed size that sums the rows which a cache drops (LESS).

exp(q k) is approximated by a product of positive features of q and of k, so features times values
of dropped rows are summed (linear attention). Source: Dong et al., "Get More with LESS:
Synthesizing Recurrence with KV Cache Compression for Efficient LLM Inference" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .attention import grouped
from .operands import Operands

F32 = torch.float32


def _features_samples() -> Iterator[Sample]:
    x, inner, outer = torch.randn(2, 2, 3, 4), torch.randn(2, 4, 6), torch.randn(2, 6, 5)
    yield (x, inner, outer), {}
    yield (x, inner, outer, torch.randn(2, 5, 5)), {}


@op(
    "x: BHTD, inner: f32 HDI, outer: f32 HIR, last: f32 HRR -> f32 BHTR",
    samples=_features_samples,
    native=Native("BHTDIR"),
)
def positive_features(
    x: Tensor, inner: Tensor, outer: Tensor, last: Tensor | None = None
) -> Tensor:
    """Positive features of queries or keys, with separate layers for each head.

    ``%f: f32[B,H,T,8] = graftwork.positive_features(%q, @kv.0.query.inner, @kv.0.query.outer)``

    x [B,H,T,D]; inner f32[H,D,I] and outer f32[H,I,R], GELU after each; optionally last f32[H,R,R];
    the result is the absolute value.
    """
    gelu = torch.nn.functional.gelu
    found = gelu(torch.matmul(gelu(torch.matmul(x.float(), inner)), outer))
    return (found if last is None else torch.matmul(found, last)).abs()


def _other_samples() -> Iterator[Sample]:
    yield (torch.tensor([[[0, 1, 2, 7]], [[0, 1, 2, 3]], [[0, 4, 5, 7]]]),), {"full": 8}


@op("rows: i64 BGK, O = full - K, O >= 1 -> i64 BGO", samples=_other_samples)
def other_rows(rows: Tensor, *, full: int) -> Tensor:
    """The rows that a full cache does not keep, ascending.

    ``%o: i64[B,G,64] = graftwork.other_rows(%k, full=1088)``

    rows i64[B,G,K] from `keep_top`, all different and below `full`.
    """
    count = rows.shape[2]
    falling = torch.arange(full, 0, -1, device=rows.device).expand(*rows.shape[:2], full)
    left = falling.scatter(2, rows, torch.zeros_like(rows))
    return full - torch.topk(left, full - count, dim=-1).values


def _add_samples() -> Iterator[Sample]:
    given = torch.rand(3, 1, 5, 4), torch.rand(3, 1, 4, 2), torch.randn(3, 1, 4, 3)
    yield (*given, torch.tensor([8, 4, 8])), {"full": 8, "block": 4}
    yield (*given, torch.tensor([8, 0, 4])), {"full": 8, "block": 4}


def _check(given: Operands, full: int, block: int) -> None:
    state, values = given.sizes["F"], given.sizes["E"]
    if state != values + 1 or not 1 <= block < full:
        raise InputError(
            f"{given.op}: expected a state of values' width and one more, and 1 <= block < full; "
            f"got {state} and {values}, block={block}, full={full}"
        )


@op(
    "state: f32 BGPF, features: f32 BGOR, values: BGOE, past: i64 B -> BGRF",
    samples=_add_samples,
    also=_check,
)
def add_dropped(
    state: Tensor, features: Tensor, values: Tensor, past: Tensor, *, full: int, block: int
) -> Tensor:
    """The sums of dropped rows, with the rows that are dropped now added.

    ``%d: f32[B,G,8,E+1] = graftwork.add_dropped(%kv.0.dropped, %f, %v, %past, full=1088,
    block=64)``

    state f32[B,G,P,E+1], P >= R; features f32[B,G,O,R] of the keys, and values [B,G,O,E], of the
    rows that a full cache drops, see `other_rows`; past i64[B] rows are valid. To a sequence with
    `full` rows the outer product of features and (values, 1) is added. past == block starts a new
    text: the state is reset.
    """
    ones = torch.ones_like(values[..., :1], dtype=F32)
    sums = torch.matmul(features.transpose(2, 3), torch.cat([values.float(), ones], -1))
    goes, begun = (past >= full).float(), (past != block).float()
    index = torch.arange(features.shape[3], device=past.device)
    held = state.index_select(2, index)
    return held * begun[:, None, None, None] + sums * goes[:, None, None, None]


def _read_samples() -> Iterator[Sample]:
    given = torch.rand(2, 4, 3, 2), torch.rand(2, 2, 5, 7)
    yield (*given, torch.tensor([[9, 10, 11], [4, 5, 6]]), torch.tensor([5, 4])), {}


@op(
    "features: f32 BHTR, state: f32 BGPF, positions: i64 BT, past: i64 B, H % G, E = F - 1 -> "
    "BHTE, BHT",
    samples=_read_samples,
    native=Native("BHTRGPF"),
)
def read_dropped(
    features: Tensor, state: Tensor, positions: Tensor, past: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over dropped rows, and its weight as in `attend_part`.

    ``%r: (f32[B,H,T,E], f32[B,H,T]) = graftwork.read_dropped(%f, %kv.0.dropped, %positions,
    %past)``

    features f32[B,H,T,R] of the queries; state f32[B,G,P,E+1] from `add_dropped`, P >= R; positions
    i64[B,T]; past i64[B]. If the step's first position is past, nothing was dropped and the weight
    is -infinity.
    """
    batch, heads, width, rank = features.shape
    groups, wide = state.shape[1], state.shape[3]
    rows = state.index_select(2, torch.arange(rank, device=past.device))
    sums = torch.matmul(grouped(features, groups), rows).reshape(batch, heads, width, wide)
    total = sums[..., wide - 1]
    some = (total > 0) & (positions[:, :1] > past[:, None])[:, None]
    total = torch.where(some, total, torch.ones_like(total))
    nothing = torch.full_like(total, float("-inf"))
    out = sums[..., : wide - 1] / total[..., None] * some[..., None].float()
    return out, torch.where(some, total.log(), nothing)
