"""Several drafters: the first that has a draft wins, sequence by sequence and step by step."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.plan import FirstDraft
from ...feeding.draft import NO_DRAFT, Draft
from .base import DRAFTERS
from .combining import CombiningDrafter


@DRAFTERS.register(FirstDraft)
class FirstDrafter(CombiningDrafter):
    """Asks the next drafter only for the sequences that still have no draft."""

    record: FirstDraft

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rooms)
        for part in self.parts:
            open_ = [0 if d.tokens else room for d, room in zip(drafts, rooms, strict=True)]
            if not any(open_):
                break
            for index, draft in enumerate(part.propose(open_)):
                if draft.fed:
                    drafts[index] = draft
        return drafts
