"""Which records of a plan have weights that nobody trained."""

from __future__ import annotations

from collections.abc import Iterable

from .base import Record


def untrained(records: Iterable[Record]) -> list[Record]:
    """The records, and parts of combined ones, whose own weights know nothing.

    >>> from graftwork.ir.plan import FirstDraft, HeadsDraft, SuffixDraft
    >>> [record.kind for record in untrained([FirstDraft((SuffixDraft(), HeadsDraft()))])]
    ['heads']
    """
    found = []
    for record in records:
        found += untrained(getattr(record, "of", ()))
        if not getattr(record, "trained", True):
            found.append(record)
    return found
