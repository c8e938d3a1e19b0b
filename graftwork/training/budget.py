"""Budgets and learning rates of training runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..data.prompts import check_seed
from ..ir import InputError

MOST_SEED = 2**32 - 1

SHORT = 0.1
"""The share of a budget that warming up takes at most."""


@dataclass(frozen=True)
class Budget:
    """How long to train. minutes: wall time of the steps. steps: optimizer steps. At least one is
    given; training ends with the first that is used up. seed: of all random numbers. Errors:
    `InputError`."""

    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    positive: ClassVar[tuple[str, ...]] = ()
    """Options that must be positive."""

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise InputError("say how long to train: minutes=, steps=, or both")
        for name in ("minutes", "steps", *self.positive):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"{name}={value}: expected a positive number")
        check_seed(self.seed, MOST_SEED)

    def used(self, step: int, seconds: float) -> float:
        """The used share of the budget; 1 or more: training is over."""
        of_steps = 0.0 if self.steps is None else step / self.steps
        of_time = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return max(of_steps, of_time)


def rate_factor(share: float, step: int, warm: int, floor: float) -> float:
    """Learning rate relative to its peak: linear warm-up over `warm` steps, or over a tenth of the
    budget if that is less, times a cosine in the `share` of the budget, 0..1, that falls to
    `floor`.

    >>> [round(rate_factor(share, 0, 50, 0.0), 3) for share in (0.0, 0.05, 0.5)]
    [0.02, 0.497, 0.5]
    """
    rising = min(1.0, max((step + 1) / warm, share / SHORT))
    return rising * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))


def check_loss(loss: float, step: int, out: Path, rate: float) -> None:
    """Errors: `InputError` for a loss that is not finite."""
    if not math.isfinite(loss):
        raise InputError(
            f"the loss became {loss} at step {step}; the last checkpoint in {out} is good: resume "
            f"from it with a lower rate than {rate}"
        )
