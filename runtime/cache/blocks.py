"""What policies share that act where a text ends a block.

No step and no piece of a prompt crosses the end of a block. So the result depends only on how many
tokens were committed, not on drafts or on the rest of the batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ...ir.execution.executable import Executable
from ...ir.plan import MarkChunks, StoreOld
from ..asking.text import Text
from .base import CACHES, CachePolicy


class BlockPolicy(CachePolicy):
    """Runs the record's function on due sequences. seen: rows of each at its last turn."""

    def __init__(self, record: Any, executable: Executable) -> None:
        super().__init__(record, executable)
        self.block: int = record.block

    def begin(self, batch: int) -> None:
        self.seen = [0] * batch

    def room(self, rows: Sequence[int]) -> int:
        return min(self.block - held % self.block for held in rows)

    @abstractmethod
    def is_due(self, rows: int) -> bool:
        """Whether the function has to run on a sequence of so many rows."""

    def ran(self, text: Text) -> None:
        """The function ran on a text: set its rows and position."""

    def settle(self, texts: Sequence[Text]) -> None:
        due = [self._is_due(index, text) for index, text in enumerate(texts)]
        if not any(due):
            return
        past = [text.rows if now else 0 for text, now in zip(texts, due, strict=True)]
        self.executable.run(self.record.function, {"past": torch.tensor(past)}, ())
        for index, (text, now) in enumerate(zip(texts, due, strict=True)):
            if now:
                self.ran(text)
                self.seen[index] = text.rows

    def _is_due(self, index: int, text: Text) -> bool:
        return not text.done and text.rows != self.seen[index] and self.is_due(text.rows)


@CACHES.register(MarkChunks)
class MarkPolicy(BlockPolicy):
    """Chunks of rows get landmarks where a text ends a block; see the pass read_chunks."""

    record: MarkChunks

    def is_due(self, rows: int) -> bool:
        return rows > 0 and rows % self.block == 0

    def back_to(self, fed: int, count: int) -> int:
        """Anywhere: landmarks of whole blocks belong to the common text; no others are read."""
        return count


@CACHES.register(StoreOld)
class StorePolicy(BlockPolicy):
    """Old rows get codes of few bits where a text ends a block; see the pass quantize_old_rows."""

    record: StoreOld

    def is_due(self, rows: int) -> bool:
        return rows % self.block == 0 and rows >= self.record.most_latest

    def back_to(self, fed: int, count: int) -> int:
        """To after the last place where rows got codes; at that place some may lack theirs."""
        if fed < self.record.most_latest:
            return count
        return count if count > fed - fed % self.block else 0
