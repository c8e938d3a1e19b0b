"""Labels of a cache's rows: a few channels of keys in few bits, by which rows are picked.

Source: Yang et al., "Post-Training Sparse Attention with Double Sparsity" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...ir import Program, State, TensorType, Weight, arguments
from ..engine.feed import watched
from .cached_rows import Written
from .exchange import beside

BITS = 4
"""Of a label's numbers."""


def label_weights(
    program: Program, caches: Sequence[Written], windows: torch.Tensor
) -> list[torch.Tensor]:
    """Of each cache f32[G,D]: how large a part of the products of queries and keys a channel has,
    the mean over all pairs of a text's tokens. windows i64[N,T]."""
    values = {f"k.{n}": cache.keys.new for n, cache in enumerate(caches)}
    values |= {f"q.{n}": arguments(cache.attend)["q"] for n, cache in enumerate(caches)}
    parts = [torch.zeros(()) for _ in caches]
    for found in watched(program, program.step, values, windows):
        for n in range(len(caches)):
            queries, keys = (found[f"{r}.{n}"][0].float().abs().mean(1) for r in "qk")
            grouped = queries.reshape(len(keys), -1, queries.shape[1]).mean(1)
            parts[n] = parts[n] + grouped * keys / len(windows)
    return parts


class Label(NamedTuple):
    """weight: i64[G,R], the channels. states: codes of rows, and their steps."""

    weight: Weight
    states: tuple[State, State]


def label_of(keys: State, channels: torch.Tensor) -> Label:
    """channels i64[G,R]."""
    base, rows = keys.name.rpartition(".key")[0], keys.type.dims[:3]
    codes = TensorType(torch.uint8, (*rows, channels.shape[1] * BITS // 8))
    steps = TensorType(torch.float32, (*rows, 2))
    label = State(f"{base}.label", codes, keys.layer, "label")
    states = beside(label, "codes", codes), beside(label, "steps", steps)
    return Label(Weight.of(f"{base}.channels", channels), states)
