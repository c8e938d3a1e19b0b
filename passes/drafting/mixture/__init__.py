"""Layers of a draft over what all layers of the target keep of the text.

Source: Zimmer et al., "Mixture of Attentions For Speculative Decoding" (2025). What the target's
layers keep of a token becomes one row of a memory, once the token is committed; drafted tokens
attend to the memory, and add nothing to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....ir.plan import DecodePlan, Returned, candidates, record
from ....ir.plan.bounds import Amount, Filled, Levels
from ....ir.support.errors import InputError
from ....runtime.memo import Memo
from ....runtime.speculate.draft_cache import DraftCache
from ....runtime.speculate.level import Ids, Level
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.cached import CachedProposer
from ....runtime.speculate.setting import Setting
from ..glide import SharingDraft


@record
@dataclass(frozen=True)
class MixtureDraft(SharingDraft):
    """Self-attention over the text's tokens, then attention to a memory of the target's layers.

    entry: takes ``positions`` [B,T] of committed tokens, ``past`` and the target's states, and
    writes the memory's rows, which `function` reads. near: the step's output that the target's head
    reads; before: the one that the target's last layers make that of, where the draft runs through
    them. longest: in training, blocks have `block` to so many tokens, drawn by the text. feature,
    token: weights of the distance to the target's states and of the tokens.
    """

    block: Levels = 6
    longest: Levels = 14
    feature: Amount = 1.0
    token: Amount = 0.1
    near: Filled[str | None] = None
    before: Filled[str | None] = None
    kind: ClassVar[str] = "mixture"

    def check(self) -> None:
        if self.longest < self.block:
            raise InputError(
                f"mixture: blocks of at least {self.block} and at most {self.longest} tokens: "
                f"expected longest={self.block} or more"
            )

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, candidates()
        if self.entry is None:
            raise InputError(f"{self.brief} names no function that makes its memory")

    @property
    def cached(self) -> tuple[str, ...]:
        return (self.function, *filter(None, [self.entry]))


@PROPOSERS.register(MixtureDraft)
class MixtureProposer(CachedProposer):
    """Writes the memory's rows of what the text has gained before each draft.

    held: rows of the memory, by sequence. They are made of the target's, and made again where a
    text goes on from an earlier call.
    """

    record: MixtureDraft

    def __init__(self, record: MixtureDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        assert record.entry is not None
        self.memory = DraftCache(self.executable, record.entry)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.held = [0] * len(prompts)

    def resume(self, index: int, memo: Memo, count: int) -> None:
        super().resume(index, memo, count)
        self.held[index] = 0

    def root(self, count: int) -> Level:
        while any(missing := self._missing()):
            self._remember(missing)
        return super().root(count)

    def _missing(self) -> list[int]:
        """Rows of each sequence's memory that can be made, as many as may be fed at once."""
        committed, widest = self.committed, self.memory.widest
        return [
            min(max(len(text) - 1 - held, 0), widest) if alive else 0
            for text, held, alive in zip(committed.texts, self.held, committed.alive, strict=True)
        ]

    def _remember(self, counts: Sequence[int]) -> None:
        width = max(counts)
        alive = self.committed.alive
        past = [held if known else 0 for held, known in zip(self.held, alive, strict=True)]
        # Columns behind a sequence's own repeat its last row; what they write is beyond its rows.
        last = np.maximum(np.array(counts, dtype=np.int64) - 1, 0)[:, None]
        places: Ids = np.array(past, dtype=np.int64)[:, None] + np.minimum(np.arange(width), last)
        nothing = np.zeros((len(counts), 1), dtype=np.int64)
        self.memory.run(places, places, past, nothing, silent=True)
        self.held = [held + count for held, count in zip(self.held, counts, strict=True)]
