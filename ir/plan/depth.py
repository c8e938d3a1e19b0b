"""Depth records: how many layers a token runs through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..contract import Contract
from .base import Record, record


@dataclass(frozen=True)
class DepthRecord(Record):
    """Base of depth records."""

    slot: ClassVar[str] = "depth"
    noun: ClassVar[str] = "depth policy"
    contract: ClassVar[Contract] = Contract.APPROXIMATE


@record
@dataclass(frozen=True)
class FullDepth(DepthRecord):
    """Every token runs through every layer."""

    kind: ClassVar[str] = "full"
