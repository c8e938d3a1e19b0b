"""Attention of functions that draft to keys and values that the target has of the text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, op
from .attention import attend

SEEN = torch.tensor([[1, 3, 3], [0, 4, 5]])


def _mask_samples() -> Iterator[Sample]:
    yield (SEEN, 6), {}
    yield (SEEN, 6), {"window": 2}


@op("seen: i64 BT, C = capacity, window >= 1 -> bool B1TC", samples=_mask_samples)
def seen_mask(seen: Tensor, capacity: int, *, window: int | None = None) -> Tensor:
    """Which rows of the target's states each token of a draft may see: the first ones.

    ``%m: bool[B,1,T,C] = graftwork.seen_mask(%seen, C, window=512)``

    seen i64[B,T]: token t sees the rows before `seen[b,t]`, but row 0 always; `window`: the last
    ones of these alone.
    """
    rows = torch.arange(capacity, device=seen.device)
    end = seen.clamp(min=1)[:, None, :, None]
    mask = rows < end
    return mask if window is None else mask & (rows >= end - window)


def _samples() -> Iterator[Sample]:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5)
    yield (q, k, v, SEEN), {"scale": 0.3}
    yield (q, k, v, SEEN), {"scale": 0.3, "softcap": 4.0, "window": 2}


@op(
    "q: BHTD, k: BGND, v: BGNE, H % G, seen: i64 BT, N >= 1, window >= 1 -> BHTE",
    samples=_samples,
)
def target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of a draft's tokens to the rows of a layer of the target, before there are caches.

    ``%y: f32[B,H,T,E] = graftwork.target_attention(%q, %target.5.key, %target.5.value, %seen,
    scale=0.125)``

    q [B,H,T,D]; k [B,G,N,D]; v [B,G,N,E], H a multiple of G; seen, window: as in `seen_mask`;
    softcap as in `attention`. Source: Du et al., "GliDe with a CaPE" (2024).
    """
    mask = seen_mask(seen, k.shape[2], window=window)
    attended: Tensor = attend(q, k, v, mask, scale=scale, softcap=softcap)
    return attended
