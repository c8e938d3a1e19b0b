"""What a length policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..draft import Draft
from ..registry import Registry

if TYPE_CHECKING:
    from ..proposers.base import Level


class LengthPolicy(ABC):
    """Bounds drafts before they are made, and learns from what came of them.

    most: draft tokens of the plan. Register a subclass with ``@LENGTHS.register(ItsRecord)``.
    """

    def __init__(self, record: Any, most: int, batch: int) -> None:
        self.record, self.most, self.batch = record, most, batch

    @abstractmethod
    def limits(self, rooms: Sequence[int]) -> list[int]:
        """Draft tokens wanted for each sequence; 0: do not speculate. rooms: levels that fit."""

    def goes_on(self, level: Level) -> bool:
        """Whether a draft that just got this level should grow another one, for any sequence."""
        return True

    def observe(self, drafts: Sequence[Draft], gained: Sequence[int], seconds: float) -> None:  # noqa: B027
        """After each step: drafts as fed, tokens gained (0: finished), time of step and check."""


LENGTHS: Registry[LengthPolicy] = Registry(__package__)
