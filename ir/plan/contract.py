"""What may be promised of a change: of a pass, and of a part of a decode plan."""

from __future__ import annotations

from enum import Enum


class Contract(Enum):
    """How the output after a change relates to the output before, strongest first."""

    EXACT = "exact"  # same logits up to float error
    LOSSLESS = "lossless"  # same output distribution; greedy: same tokens
    APPROXIMATE = "approximate"  # quality is measured and reported

    @property
    def rank(self) -> int:
        """0 for exact, rising as the promise weakens."""
        return list(Contract).index(self)
