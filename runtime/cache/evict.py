"""Rows are dropped at fixed lengths of a text.

After each `block` rows beyond `budget` a function of the program chooses which rows stay, and moves
them to the front (see `passes/caching/evict_cache`). Where that happens depends on nothing but how
many tokens were committed: no step and no piece of a prompt goes beyond such a place. So drafts
change nothing of what an evicted target says, and neither does what shares its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ir.executable import Executable
from ...ir.plan import Evict
from ..asking.text import Text
from .base import CACHES, CachePolicy


@CACHES.register(Evict)
class EvictPolicy(CachePolicy):
    """See the module docstring. seen: rows of each sequence when it last had its turn."""

    record: Evict

    def __init__(self, record: Evict, executable: Executable) -> None:
        super().__init__(record, executable)
        self.most, self.block = record.most, record.block
        # Rows of a window are found by where in its block they are, and so no step leaves one.
        self.by_block = bool(record.window) or record.always

    def begin(self, batch: int) -> None:
        """See `CachePolicy.begin`."""
        self.seen = [0] * batch
        self.executable.reserve(self.record.most)

    def room(self, rows: Sequence[int]) -> int:
        """See `CachePolicy.room`."""
        if self.by_block:
            return min(self.block - held % self.block for held in rows)
        return min(self.record.most - held for held in rows)

    def settle(self, texts: Sequence[Text]) -> None:
        """See `CachePolicy.settle`."""
        due = [self._is_due(index, text) for index, text in enumerate(texts)]
        if not any(due):
            return
        past = [text.rows if now else 0 for text, now in zip(texts, due, strict=True)]
        self.executable.run(self.record.function, {"past": torch.tensor(past)}, ())
        for index, (text, now) in enumerate(zip(texts, due, strict=True)):
            if now and text.rows == self.most:
                text.rows = self.record.budget
                if self.record.turned:
                    text.position = text.rows
            self.seen[index] = text.rows if now else self.seen[index]

    def _is_due(self, index: int, text: Text) -> bool:
        if text.done or text.rows == self.seen[index]:
            return False
        ends = text.rows % self.block == 0 if self.record.always else False
        return ends or text.rows == self.most

    def back_to(self, fed: int, count: int) -> int:
        """See `CachePolicy.back_to`: nothing was dropped or written over since the last place where
        something may have been."""
        last = max(fed - fed % self.block, 0)
        if not self.by_block and fed < self.record.most:
            last = 0
        if count < last or (self.record.always and count % self.block == 0):
            return 0
        return count
