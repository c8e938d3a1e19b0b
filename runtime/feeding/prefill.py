"""Feeding whole texts, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TypeAlias

import torch

from ...ir import InputError
from ..asking.text import Text
from ..cache.base import CachePolicy
from .draft import UnverifiedStep
from .feed import Feeder, StepFeed

Fed: TypeAlias = tuple[dict[str, torch.Tensor], list[int]]
"""See `prefill`."""

Pieces: TypeAlias = Generator[None, int | None, Fed]
"""Feeds a piece each time it is resumed. Sent: its tokens at most; None: as many as are best."""


def prefill(
    feeder: Feeder,
    texts: Sequence[Text],
    fetch: tuple[str, ...],
    cache: CachePolicy,
    read: Callable[[UnverifiedStep], None] | None = None,
    begun: Sequence[int] | None = None,
    *,
    whole: bool = True,
    told: Callable[[UnverifiedStep], None] | None = None,
) -> Pieces:
    """Feed texts, of which `begun[b]` tokens were fed (None: nothing), piece by piece; returns the
    outputs after each one's last token.

    Values a chosen token (dim S) have one column; in values a fed token (dim T) a text's last token
    is in the column of the second result. read: called with each piece; then everything is fetched
    each time. cache: settled before each piece; bounds its size. The last token's row counts once
    the token after it is committed. whole: False leaves the last tokens out; all rows count. told:
    called with each piece and what is fetched of all of its tokens, chosen or not.
    """
    sizes = [len(text.tokens) if whole else text.fed for text in texts]
    fed = [0] * len(texts) if begun is None else list(begun)
    result: dict[str, torch.Tensor] = {}
    columns = [0] * len(texts)
    bound = yield
    while left := max(size - count for size, count in zip(sizes, fed, strict=True)):
        cache.settle(texts)
        open_texts = [b for b, size in enumerate(sizes) if fed[b] < size]
        most = cache.room([texts[b].rows for b in open_texts])
        limits = [n for n in (most, bound) if n is not None]
        width = feeder.chunk(left, min(limits, default=None))
        piece = min([width, *limits])
        ends = [
            min(text.cut(n, n + piece), size)
            for text, n, size in zip(texts, fed, sizes, strict=True)
        ]
        spans = list(zip(texts, fed, ends, strict=True))
        rows = [text.tokens[n:end] for text, n, end in spans]
        width = _wide_enough(feeder, rows, width)
        # Finished sequences are fed filler behind their last row, which does not count yet. Where
        # blocks end, that would begin a block over rows still needed: the last token is fed again.
        done = [n == size for n, size in zip(fed, sizes, strict=True)]
        given = [
            text.fed_as(n - (through and most is not None), end)
            for (text, n, end), through in zip(spans, done, strict=True)
        ]
        behind = [whole and through and most is None for through in done]
        past = [text.rows + more for text, more in zip(texts, behind, strict=True)]
        starts = [text.position + more for text, more in zip(texts, behind, strict=True)]
        ending = [b for b in open_texts if ends[b] == sizes[b]]
        column = [max(len(row) - 1, 0) for row in rows]
        # Without `select` every output has a prompt's worth of columns: fetch only what is used.
        wanted = fetch if ending or feeder.selects or read or told else ()
        step = StepFeed(given, past, starts, wanted, width)
        places = [text.places[n:end] for text, n, end in spans]
        heard = None
        if told is not None:
            heard = partial(_tell, told, rows, fed)
        outputs = feeder.run_picking(step, column, places, heard)
        if read is not None:
            read(UnverifiedStep(rows, fed, outputs))
        _grow(texts, rows, ending if whole else ())
        fed = ends
        if len(ending) == len(texts):
            return outputs, column
        columns = [new if b in ending else columns[b] for b, new in enumerate(column)]
        _take(result, outputs, ending)
        bound = yield
    return result, columns


def _grow(texts: Sequence[Text], rows: Sequence[Sequence[int]], ending: Sequence[int]) -> None:
    """Count the rows of what was fed, but for the last token of texts that are fed to their end."""
    for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
        text.grow(len(row) - (index in ending))
        text.position += text.shift if index in ending else 0


def _tell(
    told: Callable[[UnverifiedStep], None],
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    outputs: dict[str, torch.Tensor],
) -> None:
    told(UnverifiedStep(rows, starts, outputs))


def _wide_enough(feeder: Feeder, rows: Sequence[Sequence[int]], width: int) -> int:
    """The width of a step that feeds the rows, of which some may be longer than it was to be.

    Errors: `InputError` where no step is as wide.
    """
    longest = max(map(len, rows))
    if longest <= width:
        return width
    found = feeder.width(longest, 0)
    if found < longest:
        raise InputError(
            f"a picture of {longest} rows, which see each other, has to be fed at once, and steps "
            f"of this target take {found} tokens at most"
        )
    return found


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
