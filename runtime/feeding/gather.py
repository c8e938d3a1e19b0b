"""Picking rows out of outputs, and writing rows into inputs.

By numpy where it can: torch shares even a few rows out among threads, which wait a millisecond for
a core while the threads of a model that has just run still spin on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def gathered(values: torch.Tensor, places: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows of [B,M,...] by i64[B,N]: a copy."""
    rows = np.arange(len(places))[:, None]
    if values.is_cpu and values.dtype != torch.bfloat16:
        found: Any = values.numpy()[rows, places]
        return torch.from_numpy(found)
    columns = torch.from_numpy(places.copy()).to(values.device)
    return values[torch.from_numpy(rows).to(values.device), columns]


def rows_of(values: torch.Tensor, index: int, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of sequence `index` of [B,M,...]: a copy."""
    if values.is_cpu and values.dtype != torch.bfloat16:
        first, last = rows[0], rows[-1]
        array: Any = values.numpy()
        found = array[index, first : last + 1]
        if list(rows) != list(range(first, last + 1)):
            found = array[index, list(rows)]
        return torch.from_numpy(found.copy())
    return gathered(values[index : index + 1], np.array([rows], dtype=np.int64))[0]


def written(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Write [B,N,...] into the first N of a buffer's M rows, zeros behind them."""
    count = values.shape[1]
    if values.is_cpu and buffer.is_cpu and values.dtype == buffer.dtype != torch.bfloat16:
        rows = buffer.numpy()
        rows[:, :count], rows[:, count:] = values.numpy(), 0
    else:
        buffer[:, :count], buffer[:, count:] = values, 0


def joined(
    before: torch.Tensor | None, values: torch.Tensor, known: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """A copy: the first `known[b]` rows of `before` [B,M,...], then those of [B,N,...] up to
    `sizes[b]` in all, then zeros."""
    result = values.new_zeros(values.shape[0], max(sizes), *values.shape[2:])
    for index, (count, size) in enumerate(zip(known, sizes, strict=True)):
        if before is not None and count:
            result[index, :count] = before[index, :count]
        result[index, count:size] = values[index, : size - count]
    return result


def widened(values: torch.Tensor, width: int) -> torch.Tensor:
    """[B,N,...] with `width` rows: the first ones, or zeros behind them."""
    short = width - values.shape[1]
    if short <= 0:
        return values[:, :width]
    return torch.cat([values, values.new_zeros(len(values), short, *values.shape[2:])], 1)


def piece(values: torch.Tensor) -> tuple[Any, int]:
    """[1,...] as something that rows of its kind can be assigned to and from by slices, and how
    many places a row takes there.

    Plain bytes where it can be: right after a model's run, which has pushed everything else out of
    the processor's caches, numpy takes 28 us for what they take 13.
    """
    if values.is_cpu and values.is_contiguous():
        flat: Any = values.view(torch.uint8).numpy().reshape(-1)
        return memoryview(flat), values.nbytes // len(values)
    return values, 1
