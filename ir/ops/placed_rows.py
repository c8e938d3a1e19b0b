"""Image rows in a text: embeddings, masks and positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from . import Sample, op


def _samples() -> Iterator[Sample]:
    tokens = torch.tensor([[3, 9, 8, 1], [11, 0, 9, 2]])
    yield (torch.randn(2, 4, 3), tokens, torch.randn(2, 5, 3), 7), {}
    yield (torch.randn(2, 4, 3), tokens, torch.randn(2, 1, 3), 12), {}


@op("x: any BTH, tokens: i64 BT, rows: x BEH -> x", samples=_samples)
def placed_rows(x: Tensor, tokens: Tensor, rows: Tensor, first: int) -> Tensor:
    """Embeddings of tokens, with image tokens replaced by rows computed outside the model.

    ``%y: f32[B,T,H] = graftwork.placed_rows(%x, %tokens, %pictures, 32064)``

    x [B,T,H]: embeddings of tokens i64[B,T]; rows [B,E,H]. Token `first` + k becomes row
    min(k, E - 1); others keep x. Source: Liu et al., "Visual Instruction Tuning" (2023).
    """
    found = rows.gather(1, _place(tokens, rows, first)[:, :, None].expand(-1, -1, x.shape[2]))
    return torch.where((tokens >= first)[:, :, None], found, x)


def _place(tokens: Tensor, rows: Tensor, first: int) -> Tensor:
    """The row of each image token, i64[B,T]; 0 for others."""
    return (tokens - first).clamp(0, rows.shape[1] - 1)


def _together_samples() -> Iterator[Sample]:
    tokens = torch.tensor([[7, 8, 1, 9], [3, 7, 8, 4]])
    blocks = torch.tensor([[0, 0, 1], [5, 5, 5]])
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    for ancestors in (None, tree.expand(2, 4, 4)):
        yield (tokens, blocks, ancestors, 7), {}


@op("tokens: i64 BT, blocks: i64 BE, ancestors: bool BTT -> bool BTT", samples=_together_samples)
def seen_together(tokens: Tensor, blocks: Tensor, ancestors: Tensor | None, first: int) -> Tensor:
    """Ancestors of a step's tokens where image tokens of a block see each other.

    ``%a: bool[B,T,T] = graftwork.seen_together(%tokens, %pictures.blocks, None, 32064)``

    tokens i64[B,T], `first` + k for row k as in `placed_rows`; blocks i64[B,E]: rows with equal
    numbers see each other in both directions. Other pairs follow ancestors bool[B,T,T], or the
    causal order if it is None. The result is `ancestors` for `step_mask`. Source: Gemma Team,
    "Gemma 3 Technical Report" (2025).
    """
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    before = (steps[:, None] >= steps[None, :])[None] if ancestors is None else ancestors
    block = blocks.gather(1, _place(tokens, blocks, first))
    block = torch.where(tokens >= first, block, -1)
    same = (block[:, :, None] == block[:, None, :]) & (block[:, :, None] >= 0)
    return before | same


def _angle_samples() -> Iterator[Sample]:
    tokens = torch.tensor([[7, 8, 1, 9], [3, 7, 8, 4]])
    positions = torch.tensor([[0, 0, 2, 3], [4, 5, 6, 7]])
    places = torch.randint(0, 9, (2, 3, 3))
    for axes in ([0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2]):
        yield (torch.randn(9, 6), positions, tokens, places, 7), {"axes": axes}


@op(
    "R = len(axes), A = 3, table: PR, positions: i64 BT, tokens: i64 BT, places: i64 BEA -> BTR",
    samples=_angle_samples,
)
def placed_angles(
    table: Tensor,
    positions: Tensor,
    tokens: Tensor,
    places: Tensor,
    first: int,
    *,
    axes: Sequence[int],
) -> Tensor:
    """Rotary angles of tokens, where image rows have three-dimensional positions (M-RoPE).

    ``%c: f32[B,T,R] = graftwork.placed_angles(@cos, %positions, %tokens, %pictures.places, 32064,
    axes=[0, 0, 1, 1, 2, 2])``

    table [P,R]; positions i64[B,T]; tokens i64[B,T], `first` + k for row k as in `placed_rows`;
    places i64[B,E,3]: time, height and width of the rows. Column j is looked up at places[..,
    axes[j]] for image tokens and at the position for others. Source: Wang et al., "Qwen2-VL"
    (2024), multimodal rotary position embedding.
    """
    row, stands = _place(tokens, places, first), tokens >= first
    found = [
        torch.where(stands, places.select(2, axis).gather(1, row), positions) for axis in range(3)
    ]
    parts, start = [], 0
    for axis, run in groupby(axes):
        count = len(list(run))
        parts.append(torch.nn.functional.embedding(found[axis], table.narrow(1, start, count)))
        start += count
    return torch.cat(parts, 2)
