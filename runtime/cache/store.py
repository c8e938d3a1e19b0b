"""Old rows get codes of few bits where a text ends a block; see the pass quantize_old_rows."""

from __future__ import annotations

from ...ir.plan import StoreOld
from .base import CACHES
from .blocks import BlockPolicy


@CACHES.register(StoreOld)
class StorePolicy(BlockPolicy):
    """See the module docstring."""

    record: StoreOld

    def is_due(self, rows: int) -> bool:
        return rows % self.block == 0 and rows >= self.record.most_latest

    def back_to(self, fed: int, count: int) -> int:
        """To after the last place where rows got codes; at that place some may lack theirs."""
        if fed < self.record.most_latest:
            return count
        return count if count > fed - fed % self.block else 0
