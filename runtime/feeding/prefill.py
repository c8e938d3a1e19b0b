"""Filling the cache with whole texts, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..speculate.drafters.base import Fed
from .feed import Feeder


def prefill(
    feeder: Feeder,
    texts: Sequence[Sequence[int]],
    cached: Sequence[int],
    fetch: tuple[str, ...],
    read: Callable[[Fed], None] | None = None,
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Feed what of each text is not cached; the outputs after each text's last token.

    Values a chosen token (dim S) have one column; in values a fed token (dim T) a text's last token
    is where the second result says. texts: tokens of each sequence (none for a finished one).
    cached: rows each cache holds already. read: told of every piece that was fed, and then
    everything is fetched each time.
    Sequences that are through get garbage after their last row, where the next step overwrites it.
    Where a chunk would pass the end of the context it starts earlier and feeds some tokens again:
    the same tokens at the same positions, so the same rows.
    """
    cached = list(cached)
    left = _left(texts, cached)
    result: dict[str, torch.Tensor] = {}
    columns = [0] * len(texts)
    while left:
        width = feeder.chunk(left)
        starts = [min(rows, feeder.context - width) for rows in cached]
        rows = [text[s : s + width] for text, s in zip(texts, starts, strict=True)]
        last = [len(text) - 1 - s for text, s in zip(texts, starts, strict=True)]
        column = [min(max(index, 0), width - 1) for index in last]
        ending = [b for b, text in enumerate(texts) if cached[b] < len(text) <= starts[b] + width]
        cached = [max(r, s + len(row)) for r, s, row in zip(cached, starts, rows, strict=True)]
        left = _left(texts, cached)
        # Without `select` every output has a prompt's worth of columns: fetch only what is used.
        wanted = fetch if ending or feeder.selects or read else ()
        outputs = feeder.run_picking(rows, starts, width, wanted, column)
        if read is not None:
            read(Fed(rows, starts, outputs))
        if not left and len(ending) == len(texts):
            return outputs, column
        for index in ending:
            columns[index] = column[index]
        _take(result, outputs, ending)
    return result, columns


def _left(texts: Sequence[Sequence[int]], cached: Sequence[int]) -> int:
    return max(len(text) - rows for text, rows in zip(texts, cached, strict=True))


def _take(
    result: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], ending: list[int]
) -> None:
    for name, value in outputs.items():
        kept, width = result.get(name), value.shape[1]
        if kept is None or kept.shape[1] < width:
            wider = torch.zeros_like(value)
            if kept is not None:
                wider[:, : kept.shape[1]] = kept
            result[name] = wider
        result[name][ending, :width] = value[ending]
