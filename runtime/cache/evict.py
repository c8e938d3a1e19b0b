"""Rows are dropped at fixed lengths of a text.

After each `block` rows beyond `budget` a function of the program chooses the rows that stay and
moves them to the front (see `passes/caching/evict_cache`; `blocks` says why at fixed lengths).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.execution.executable import Executable
from ...ir.plan import Evict
from ..asking.text import Text
from .base import CACHES
from .blocks import BlockPolicy


@CACHES.register(Evict)
class EvictPolicy(BlockPolicy):
    """See the module docstring."""

    record: Evict

    def __init__(self, record: Evict, executable: Executable) -> None:
        super().__init__(record, executable)
        self.most = record.most
        # Rows of a window are found by where in its block they are, and so no step leaves one.
        self.by_block = bool(record.window) or record.always

    def begin(self, batch: int) -> None:
        super().begin(batch)
        program = self.executable.program
        dropping = program.function(self.record.function).inputs
        names = {str(node.target) for node in dropping} & program.states.keys()
        if any(program.states[name].capacity == "C" for name in names):
            self.executable.reserve(self.record.most)

    def room(self, rows: Sequence[int]) -> int:
        if self.by_block:
            return super().room(rows)
        return min(self.record.most - held for held in rows)

    def is_due(self, rows: int) -> bool:
        record, ends = self.record, rows % self.block == 0
        first = bool(record.opening) and rows == self.block
        return rows == self.most or (record.always and ends and (first or rows >= record.since))

    def ran(self, text: Text) -> None:
        if text.rows == self.most:
            text.rows = self.record.budget
            if self.record.turned:
                text.position = text.rows

    def back_to(self, fed: int, count: int) -> int:
        """To after the last place where rows may have been dropped or written over."""
        last = max(fed - fed % self.block, 0)
        if not self.by_block and fed < self.record.most:
            last = 0
        if count < last or (self.record.always and count % self.block == 0):
            return 0
        return count
