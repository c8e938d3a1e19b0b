"""No draft: plain decoding, one token a step."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.plan import NoDraft
from ...feeding.draft import NO_DRAFT, Draft
from .base import DRAFTERS, Drafter


@DRAFTERS.register(NoDraft)
class NoDrafter(Drafter):
    """Proposes nothing."""

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT] * len(rooms)
