"""Markers of the residual stream for passes: identities that lowering removes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, op

HEAD = "head"
"""The point of a marker that only a further head reads."""


def _samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8),), {"layer": 1, "point": "attention"}


@op("x: any ...H -> x", samples=_samples)
def hidden(x: Tensor, *, layer: int, point: str) -> Tensor:
    """The residual stream, unchanged, at a named point.

    ``%h: f32[B,T,H] = graftwork.hidden(%x, layer=3, point="block")``

    x [B,T,H]. `point` is "embedding" (before layer 0, layer=-1), "attention" (after the layer's
    attention was added), "block" (after the layer's last addition) or "head" (what a further head
    reads: one of a lower layer, or of another model in the step).
    """
    return x.clone()
