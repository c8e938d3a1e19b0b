"""Every row for good, and those behind an edit for the text that was edited; see `edits`."""

from __future__ import annotations

from ...ir.execution.executable import Executable
from ...ir.plan import KeepEdited
from .base import CACHES
from .keep_all import KeepAllPolicy


@CACHES.register(KeepEdited)
class KeepEditedPolicy(KeepAllPolicy):
    """The states grow with the text."""

    record: KeepEdited

    def __init__(self, record: KeepEdited, executable: Executable) -> None:
        super().__init__(record, executable)
        self.least = record.least
