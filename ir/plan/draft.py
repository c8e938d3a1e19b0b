"""Draft records: where the tokens that a step verifies come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Record, record


@dataclass(frozen=True)
class DraftRecord(Record):
    """Base of draft records."""

    slot: ClassVar[str] = "draft"

    @property
    def most(self) -> int | None:
        """Draft tokens a step at most; None: as many as the plan's tree has nodes."""
        return None


@record
@dataclass(frozen=True)
class NoDraft(DraftRecord):
    """Plain decoding: every step verifies an empty draft and yields one token."""

    kind: ClassVar[str] = "none"

    @property
    def most(self) -> int:
        """0."""
        return 0


@record
@dataclass(frozen=True)
class SuffixDraft(DraftRecord):
    """Copy what followed the longest earlier occurrence of the text's suffix (CopySpec).

    tokens: draft tokens a step at most. longest, shortest: lengths of suffix that count, in tokens.
    """

    tokens: int = 10
    longest: int = 16
    shortest: int = 2
    kind: ClassVar[str] = "suffix"

    @property
    def most(self) -> int:
        """`tokens`."""
        return self.tokens


@record
@dataclass(frozen=True)
class RecyclingDraft(DraftRecord):
    """A table of the tokens that followed each token most likely when it was last seen.

    successors: candidates kept a token. The tree is drawn from the table breadth first.
    """

    successors: int = 8
    kind: ClassVar[str] = "recycling"


@record
@dataclass(frozen=True)
class FirstDraft(DraftRecord):
    """The draft of the first of several drafters that has one, step by step and by sequence.

    of: the drafters, in order of preference.
    """

    of: tuple[DraftRecord, ...] = ()
    kind: ClassVar[str] = "first"

    @property
    def most(self) -> int | None:
        """The most of all; None if one follows the plan's tree."""
        sizes = [draft.most for draft in self.of]
        known = [size for size in sizes if size is not None]
        return max(known, default=0) if len(known) == len(sizes) else None
