"""What steps cost by width, learned while decoding."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import numpy as np
import numpy.typing as npt

NEW = 0.1
"""Weight of a new measurement, once there are so many that their mean weighs each less."""

SLOPE = 0.05
"""What a further column costs, as a share of a step of one, as long as nothing is known."""

OUTLIER, FIRST_OUTLIER = 3.0, 1.5
"""A step that takes so many times what was expected was disturbed, or compiled something; the first
one of a width that takes so much more found its memory: what does not seem to pay is not measured
again, so it must not decide."""


class Costs:
    """Seconds of a step by the columns that it feeds: averages where measured, lines between.

    Never falling with the width: a wider step that seems cheaper is noise.
    """

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.seconds: list[float] = []
        self.counts: list[int] = []
        self.doubtful: set[int] = set()
        self.rising: list[float] = []

    def known(self, width: int) -> int:
        """How often a width was measured."""
        place = bisect_left(self.widths, width)
        there = place < len(self.widths) and self.widths[place] == width
        return self.counts[place] if there else 0

    def add(self, width: int, seconds: float, *, trusted: bool = False) -> float:
        """Record one timing; returns its seconds, or the expected ones if it is an outlier.
        trusted: skip the outlier test."""
        place = bisect_left(self.widths, width)
        before = self.one(width) if self.widths else seconds
        known = self.known(width)
        strange = not trusted and seconds > (OUTLIER if known else FIRST_OUTLIER) * before
        if not known:
            if strange and width not in self.doubtful:
                self.doubtful.add(width)
                return before
            self.widths.insert(place, width)
            self.seconds.insert(place, seconds)
            self.counts.insert(place, 1)
            self.rising = list(accumulate(self.seconds, max))
            return seconds
        old, count = self.seconds[place], self.counts[place]
        seconds = OUTLIER * old if strange else seconds
        # The first step of a width may have compiled it or found its memory: the second knows.
        share = max(NEW, 1 / count)
        new = min(old, seconds) if count == 1 else old + share * (seconds - old)
        self.seconds[place], self.counts[place] = new, count + 1
        self.rising = list(accumulate(self.seconds, max))
        return old if strange else seconds

    def at(self, widths: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Expected seconds at each width, or mean width; needs one measurement at least."""
        beyond = np.maximum(widths - self.widths[-1], 0) * self._slope()
        return np.asarray(np.interp(widths, self.widths, self.rising) + beyond)

    def one(self, width: int) -> float:
        """Expected seconds at one width: `at` without arrays, which a step has no time for."""
        place = bisect_left(self.widths, width)
        if place == len(self.widths):
            return self.rising[-1] + (width - self.widths[-1]) * self._slope()
        if place == 0 or self.widths[place] == width:
            return self.rising[place]
        low, high = self.widths[place - 1], self.widths[place]
        share = (width - low) / (high - low)
        return self.rising[place - 1] + share * (self.rising[place] - self.rising[place - 1])

    def _slope(self) -> float:
        """Seconds that a column costs beyond the widest step that was measured."""
        if len(self.widths) == 1:
            return SLOPE * self.rising[0]
        return (self.rising[-1] - self.rising[0]) / (self.widths[-1] - self.widths[0])
