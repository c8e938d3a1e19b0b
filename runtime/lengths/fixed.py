"""Drafts as they come."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.plan import FixedLength
from .base import LENGTHS, LengthPolicy


@LENGTHS.register(FixedLength)
class FixedLengthPolicy(LengthPolicy):
    """Always the whole draft."""

    def limits(self, rooms: Sequence[int]) -> list[int]:
        """The plan's most wherever anything fits."""
        return [self.most if room > 0 else 0 for room in rooms]
