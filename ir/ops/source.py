"""Encoder and cross attention, and relative position biases (T5)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, op
from .attention import attend, by_distance, check_distances, held_positions
from .operands import Operands


def _distance_samples() -> Iterator[Sample]:
    past, positions = torch.tensor([2, 5]), torch.tensor([[2, 3, 3], [5, 6, 7]])
    yield (torch.randn(4, 7), past, positions, 9), {}
    yield (torch.randn(2, 5), past, positions + 4, 9, torch.arange(18).reshape(2, 9) // 2), {}


def _check(given: Operands, table: Tensor) -> None:
    if table.shape[1] % 2 == 0:
        given.refuse("table", table, ("H", "2R+1"))


@op(
    "table: HP, also, past: i64 B, positions: i64 BT, C = capacity, row_positions: i64 BC -> "
    "f32 BHTC",
    samples=_distance_samples,
    also=_check,
)
def distance_bias(
    table: Tensor,
    past: Tensor,
    positions: Tensor,
    capacity: int,
    row_positions: Tensor | None = None,
) -> Tensor:
    """Relative position bias of scores over cache rows.

    ``%b: f32[B,H,T,C] = graftwork.distance_bias(@table, %past, %positions, C)``

    table [H,2R+1], indexed by clamp(row position - token position, -R, R) + R; past i64[B];
    positions i64[B,T]; row_positions i64[B,C] as in `step_mask`. Source: Raffel et al., "Exploring
    the Limits of Transfer Learning" (T5's relative position buckets, 2020).
    """
    held, _, _ = held_positions(past, positions, capacity, row_positions)
    return by_distance(table, held[:, None, :] - positions[:, :, None]).permute(0, 3, 1, 2)


def _rows_samples() -> Iterator[Sample]:
    yield (torch.tensor([3, 0, 5]), 5), {}


@op("lengths: i64 B, N = count -> bool BN", samples=_rows_samples)
def source_rows(lengths: Tensor, count: int) -> Tensor:
    """Mask of valid source rows: the first `lengths` of `count`.

    ``%m: bool[B,E] = graftwork.source_rows(%lengths, E)``

    lengths i64[B].
    """
    return torch.arange(count, device=lengths.device)[None, :] < lengths[:, None]


def _source_samples() -> Iterator[Sample]:
    q, lengths = torch.randn(2, 4, 3, 8), torch.tensor([4, 6])
    yield (q, torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5), lengths), {"layer": 0, "scale": 0.3}
    k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8)
    alone = {"layer": 1, "scale": 1.0, "softcap": 4.0}
    yield (q, k, v, torch.tensor([1, 3]), torch.randn(4, 5)), alone


@op(
    "q: BHTD, k: BGND, v: BGNE, H % G, lengths: i64 B, distances: HP -> BHTE",
    samples=_source_samples,
    also=check_distances,
)
def source_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    distances: Tensor | None = None,
    *,
    layer: int,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Unmasked attention to a source: an encoder's self-attention, or a decoder's cross attention.

    ``%y: f32[B,H,T,E] = graftwork.source_attention(%q, %k, %v, %lengths, layer=0, scale=0.125)``

    q [B,H,T,D]; k [B,G,N,D]; v [B,G,N,E], H a multiple of G; lengths i64[B] >= 1: valid rows of
    each source, the rest is padding. distances [H,2R+1]: as `distance_bias`, for token t and row n
    at the positions t and n. softcap as in `attention`. layer: the layer's index.
    """
    width, rows = q.shape[2], k.shape[2]
    mask = source_rows(lengths, rows)[:, None, None, :].expand(-1, 1, width, -1)
    bias = None
    if distances is not None:
        steps = torch.arange(width, device=q.device).expand(len(q), width)
        bias = distance_bias(distances, torch.zeros_like(lengths), steps, rows)
    attended: Tensor = attend(q, k, v, mask, bias, scale=scale, softcap=softcap)
    return attended
