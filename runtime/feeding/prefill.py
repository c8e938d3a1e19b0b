"""Feeding whole texts, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...ir import InputError
from ..asking.text import Text
from ..cache.base import CachePolicy
from .draft import UnverifiedStep
from .feed import Feeder, StepFeed


def prefill(
    feeder: Feeder,
    texts: Sequence[Text],
    fetch: tuple[str, ...],
    cache: CachePolicy,
    read: Callable[[UnverifiedStep], None] | None = None,
    begun: Sequence[int] | None = None,
    *,
    whole: bool = True,
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Feed texts of which `begun[b]` tokens were fed (None: nothing); the outputs after each one's
    last token.

    Values a chosen token (dim S) have one column; in values a fed token (dim T) a text's last token
    is where the second result says. read: told of every piece that was fed, and then everything is
    fetched each time. cache: has its turn before every piece, and says how large one may be.
    The texts' rows and positions go up to the last token, whose row counts when what follows it is
    committed, as that of any step's first token does. What sequences get that are through, the next
    step overwrites. whole: False leaves the last tokens out, and the rows of all others count.
    """
    sizes = [len(text.tokens) if whole else text.fed for text in texts]
    fed = [0] * len(texts) if begun is None else list(begun)
    result: dict[str, torch.Tensor] = {}
    columns = [0] * len(texts)
    while left := max(size - count for size, count in zip(sizes, fed, strict=True)):
        cache.settle(texts)
        open_texts = [b for b, size in enumerate(sizes) if fed[b] < size]
        most = cache.room([texts[b].rows for b in open_texts])
        width = feeder.chunk(left, most)
        piece = width if most is None else min(width, most)
        ends = [
            min(text.cut(n, n + piece), size)
            for text, n, size in zip(texts, fed, sizes, strict=True)
        ]
        rows = [text.tokens[n:end] for text, n, end in zip(texts, fed, ends, strict=True)]
        width = _wide_enough(feeder, rows, width)
        # A sequence that is through gets garbage behind its last row, which does not count yet.
        # Where blocks end, that would begin another one, in the place of what this one still
        # needs: its last token is fed again.
        through = [count == size for count, size in zip(fed, sizes, strict=True)]
        again = most is not None
        given = [
            text.fed_as(n - int(done and again), end)
            for text, n, end, done in zip(texts, fed, ends, through, strict=True)
        ]
        behind = [int(done and whole and not again) for done in through]
        past = [text.rows + past for text, past in zip(texts, behind, strict=True)]
        starts = [text.position + past for text, past in zip(texts, behind, strict=True)]
        counts = [count + len(row) for count, row in zip(fed, rows, strict=True)]
        ending = [b for b in open_texts if counts[b] == sizes[b]]
        column = [len(row) - 1 if row else 0 for row in rows]
        # Without `select` every output has a prompt's worth of columns: fetch only what is used.
        wanted = fetch if ending or feeder.selects or read else ()
        places = [text.places[n:end] for text, n, end in zip(texts, fed, ends, strict=True)]
        step = StepFeed(given, past, starts, wanted, width)
        outputs = feeder.run_picking(step, column, places)
        if read is not None:
            read(UnverifiedStep(rows, fed, outputs))
        for b, row in enumerate(rows):
            last = whole and b in ending
            texts[b].grow(len(row) - last)
            texts[b].position += texts[b].shift if last else 0
        fed = counts
        if len(ending) == len(texts):
            return outputs, column
        for index in ending:
            columns[index] = column[index]
        _take(result, outputs, ending)
    return result, columns


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
