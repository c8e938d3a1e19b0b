"""The decode plan: how a program's functions become a generation loop, as data.

Each record is frozen and typed; a pass replaces records, the runtime looks up the class that
carries one out, the text form prints ``kind(field=value)``.

    >>> str(DecodePlan(draft=SuffixDraft(tokens=6)).draft)
    'suffix(tokens=6, longest=16, shortest=2)'
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar


@dataclass(frozen=True)
class Record:
    """Base of all plan records. `kind` is the name in the text form; `slot` the plan's field."""

    kind: ClassVar[str] = ""
    slot: ClassVar[str] = ""

    def __str__(self) -> str:
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{self.kind}({shown})"


RECORDS: dict[tuple[str, str], type[Record]] = {}


def record(cls: type[Record]) -> type[Record]:
    """Class decorator: make a record known to the parser under (slot, kind)."""
    RECORDS[cls.slot, cls.kind] = cls
    return cls


@record
@dataclass(frozen=True)
class NoDraft(Record):
    """Plain decoding: every step verifies an empty draft and yields one token."""

    kind: ClassVar[str] = "none"
    slot: ClassVar[str] = "draft"


@record
@dataclass(frozen=True)
class SuffixDraft(Record):
    """Copy what followed the longest earlier occurrence of the text's suffix (CopySpec).

    tokens: draft tokens a step at most. longest, shortest: lengths of suffix that count, in tokens.
    """

    tokens: int = 10
    longest: int = 16
    shortest: int = 2
    kind: ClassVar[str] = "suffix"
    slot: ClassVar[str] = "draft"


@record
@dataclass(frozen=True)
class Lossless(Record):
    """Keep the target's distribution: argmax agreement when greedy, rejection when sampling."""

    kind: ClassVar[str] = "lossless"
    slot: ClassVar[str] = "verify"


@record
@dataclass(frozen=True)
class Chain(Record):
    """The draft is a sequence: each token continues the one before."""

    kind: ClassVar[str] = "chain"
    slot: ClassVar[str] = "tree"


@record
@dataclass(frozen=True)
class FullDepth(Record):
    """Every token runs through every layer."""

    kind: ClassVar[str] = "full"
    slot: ClassVar[str] = "depth"


@record
@dataclass(frozen=True)
class KeepAll(Record):
    """The cache keeps every committed token's rows."""

    kind: ClassVar[str] = "all"
    slot: ClassVar[str] = "cache"


@dataclass(frozen=True)
class DecodePlan:
    """Drafter, tree, verifier, depth policy and cache policy of a generation loop."""

    draft: Record = field(default_factory=NoDraft)
    tree: Record = field(default_factory=Chain)
    verify: Record = field(default_factory=Lossless)
    depth: Record = field(default_factory=FullDepth)
    cache: Record = field(default_factory=KeepAll)
