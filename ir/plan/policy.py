"""Length, verification, depth and cache records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Record, record


@record
@dataclass(frozen=True)
class FixedLength(Record):
    """Drafts are as long as drafter and tree make them."""

    kind: ClassVar[str] = "fixed"
    slot: ClassVar[str] = "length"


@record
@dataclass(frozen=True)
class Lossless(Record):
    """Keep the target's distribution: argmax agreement when greedy, rejection when sampling."""

    kind: ClassVar[str] = "lossless"
    slot: ClassVar[str] = "verify"


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
