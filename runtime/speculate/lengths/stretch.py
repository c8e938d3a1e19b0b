"""Drafts that end where a stretch of the text does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....ir.execution.executable import Executable
from ....ir.plan import StretchLength
from ...feeding.draft import VerifiedStep
from ..level import Ids, Level
from .base import LENGTHS, Flags, LengthPolicy


@LENGTHS.register(StretchLength)
class StretchPolicy(LengthPolicy):
    """Whole stretches, or none where it is the target's turn.

    alone: by sequence, whether the target writes up to the next end. going: bool[batch], drafts
    whose last token ends no stretch. Source: Liao et al., "Reward-Guided Speculative Decoding for
    Efficient LLM Reasoning" (RSD, 2025), Algorithm 1.
    """

    record: StretchLength

    def __init__(self, record: StretchLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.most = min(self.most, record.most)
        self.ends = np.array(record.ends, dtype=np.int64)
        self.alone = [False] * batch
        self.going = self.always

    def limits(self, rooms: Sequence[int]) -> list[int]:
        return [
            self.most if room > 0 and not alone else 0
            for room, alone in zip(rooms, self.alone, strict=True)
        ]

    def chose(self, tokens: Ids) -> None:
        self.going = ~np.isin(tokens, self.ends)

    def goes_on(self, level: Level, depth: int) -> Flags:
        return self.going

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        each = zip(taken.drafts, taken.paths, taken.tokens, strict=True)
        for index, (draft, path, tokens) in enumerate(each):
            if tokens and tokens[-1] in self.record.ends:
                self.alone[index] = False
            elif draft.tokens:
                # Of a draft that is kept, all but the last token are nodes of the path.
                self.alone[index] = not path and list(tokens) != list(draft.tokens)
