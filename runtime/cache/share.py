"""Rows that all texts of a batch begin with are held once; see the pass share_prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...ir.execution.executable import Executable
from ...ir.plan import KeepShared
from ..asking.text import Text
from .base import CACHES
from .conversations import common
from .keep_all import KeepAllPolicy

LEAST = 32
"""Tokens that are worth a place of their own."""


@CACHES.register(KeepShared)
class SharePolicy(KeepAllPolicy):
    """The states grow with the text, behind what it has in common with others."""

    record: KeepShared
    shares = True

    def __init__(self, record: KeepShared, executable: Executable) -> None:
        super().__init__(record, executable)
        self.shared = 0

    def share(self, texts: Sequence[Text], known: Sequence[int]) -> None:
        tokens = [text.tokens for text in texts]
        first, last = min(tokens), max(tokens)  # all others begin as these do
        alike = common(first, last, min(known))
        self.shared = alike if len(texts) > 1 and alike >= LEAST else 0

    def place(self, rows: Mapping[str, torch.Tensor]) -> None:
        self.executable.reserve(self.shared, self.record.capacity)
        part, states = self.record.part, self.executable.program.states
        shared = {f"{name}.{part}": held for name, held in rows.items()}
        # Others than those of attention are read where a step writes them, and nowhere else.
        self.executable.write_rows(0, 0, {n: held for n, held in shared.items() if n in states})

    def begin(self, batch: int) -> None:
        """See `CachePolicy.begin`: from here on steps read so many rows."""
        self.executable.write_rows(0, 0, {self.record.held_rows: torch.tensor([self.shared])})
