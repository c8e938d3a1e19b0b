"""No draft: plain decoding, one token a step."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.plan import NoDraft
from ...feeding.draft import NO_DRAFT, Draft, VerifiedStep
from .base import DRAFTERS, Drafter


@DRAFTERS.register(NoDraft)
class NoDrafter(Drafter):
    """Proposes nothing."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing to prepare."""

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        """An empty draft for each sequence."""
        return [NO_DRAFT] * len(rooms)

    def observe(self, taken: VerifiedStep) -> None:
        """Nothing to learn."""
