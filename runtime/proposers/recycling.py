"""Recycle what the target thought before: the likeliest successors of each token, last time.

Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models
with Token Recycling" (2024).

The table [V,K] is updated with the best K tokens of *every* node that a step verified, accepted or
not, so it learns some tens of rows a step, and it outlives a request: the executable keeps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir.executable import Executable
from ...ir.plan import RecyclingDraft
from ..drafters.base import Taken
from ..options import GenerationOptions
from .base import PROPOSERS, Ids, Level, Proposer

_TABLES: weakref.WeakKeyDictionary[Any, Ids] = weakref.WeakKeyDictionary()


@PROPOSERS.register(RecyclingDraft)
class RecyclingProposer(Proposer):
    """Looks successors up by token alone. See the module docstring."""

    record: RecyclingDraft
    wants = ("top_tokens",)

    def __init__(
        self, record: RecyclingDraft, executable: Executable, options: GenerationOptions
    ) -> None:
        super().__init__(record, executable, options)
        shape = (executable.program.info.vocab_size, record.successors)
        table = _TABLES.get(executable)
        if table is None or table.shape != shape:
            table = _TABLES[executable] = np.full(shape, -1, dtype=np.int64)
        self.table = table
        # Ranks are all that is known; any falling scores give their order.
        self.scores = -np.arange(1, record.successors + 1, dtype=np.float32)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start from each prompt's last token."""
        self.last = np.array([prompt[-1] for prompt in prompts], dtype=np.int64)

    def observe(self, taken: Taken) -> None:
        """Learn the successors of the root and of every draft node."""
        best = taken.outputs["top_tokens"].numpy()
        for index, (draft, tokens) in enumerate(zip(taken.drafts, taken.tokens, strict=True)):
            if not tokens:
                continue
            fed = [int(self.last[index]), *draft.tokens]
            # Later rows win where a token occurs twice: they are the longer contexts.
            self.table[fed] = best[index, : len(fed), : self.record.successors]
            self.last[index] = tokens[-1]

    def root(self, count: int) -> Level:
        """Successors of each sequence's last token."""
        return self._level(self.last[:, None], count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """Successors of the nodes' tokens."""
        return self._level(tokens, count)

    def _level(self, tokens: Ids, count: int) -> Level:
        known = self.table[tokens][..., :count]
        known = np.where(tokens[..., None] < 0, -1, known)
        scores = np.broadcast_to(self.scores[: known.shape[-1]], known.shape)
        return Level(known, scores)
