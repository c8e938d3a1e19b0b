"""What may be promised of a change: of a pass, and of a part of a decode plan."""

from __future__ import annotations

from enum import Enum


class Contract(Enum):
    """How the output after a change relates to the output before, strongest first."""

    EXACT = "exact"  # same logits up to float error
    LOSSLESS = "lossless"  # same output distribution; greedy: same tokens
    TUNED = "tuned"  # lossless, of a target whose weights were trained; the change is measured
    APPROXIMATE = "approximate"  # quality is measured and reported

    @property
    def changes(self) -> bool:
        """Whether texts may be others than the model's own, and quality is measured."""
        return self.rank >= Contract.TUNED.rank

    @property
    def rank(self) -> int:
        """0 for exact, rising as the promise weakens."""
        return list(Contract).index(self)


def changes(contract: str) -> bool:
    """`Contract.changes` of a contract by name; False for "", where there is none."""
    return bool(contract) and Contract(contract).changes
