"""Which records of a plan have weights that nobody trained."""

from __future__ import annotations

from collections.abc import Iterable

from .base import Record


def untrained(records: Iterable[Record]) -> list[Record]:
    """The records, and parts of them, whose own weights know nothing.

    >>> from graftwork.ir.plan import CachedDraft, FirstDraft, HeadsDraft
    >>> draft = FirstDraft((CachedDraft(trained=True), HeadsDraft()))
    >>> [record.kind for record in untrained([draft])]
    ['heads']
    """
    parts = [part for record in records for part in record.trains]
    return [part for part in parts if not getattr(part, "trained", True)]
