"""Cache records: which rows of the committed text the states keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..contract import Contract
from .base import Record, record


@dataclass(frozen=True)
class CacheRecord(Record):
    """Base of cache records."""

    slot: ClassVar[str] = "cache"
    noun: ClassVar[str] = "cache policy"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})


@record
@dataclass(frozen=True)
class KeepAll(CacheRecord):
    """The cache keeps every committed token's rows."""

    kind: ClassVar[str] = "all"
