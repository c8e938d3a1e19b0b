"""Steps of which not every token runs through every layer."""

from __future__ import annotations

from .base import Decoding
from .general import GeneralRound


class StagedRound(GeneralRound):
    """A general step, which asks the depth policy; no faster one does."""

    @classmethod
    def fits(cls, decoding: Decoding) -> bool:
        """Where the policy stops some tokens."""
        return decoding.program.plan.depth.stops
