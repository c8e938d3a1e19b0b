"""Chunks of rows get landmarks where a text ends a block; see the pass read_chunks."""

from __future__ import annotations

from ...ir.plan import MarkChunks
from .base import CACHES
from .blocks import BlockPolicy


@CACHES.register(MarkChunks)
class MarkPolicy(BlockPolicy):
    """See the module docstring."""

    record: MarkChunks

    def is_due(self, rows: int) -> bool:
        return rows > 0 and rows % self.block == 0

    def back_to(self, fed: int, count: int) -> int:
        """Anywhere: landmarks of whole blocks belong to the common text; no others are read."""
        return count
