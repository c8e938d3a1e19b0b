"""Every row for good, also behind an edit of a text (see `edits`)."""

from __future__ import annotations

from ...ir.execution.executable import Executable
from ...ir.plan import KeepAll, KeepEdited
from .base import CACHES, CachePolicy


@CACHES.register(KeepAll)
class KeepAllPolicy(CachePolicy):
    """The states grow with the text."""

    def back_to(self, fed: int, count: int) -> int:
        return count


@CACHES.register(KeepEdited)
class KeepEditedPolicy(KeepAllPolicy):
    """The states grow with the text."""

    record: KeepEdited

    def __init__(self, record: KeepEdited, executable: Executable) -> None:
        super().__init__(record, executable)
        self.least = record.least
