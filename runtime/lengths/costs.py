"""What steps cost by width, learned while decoding."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

NEW = 0.1
"""Weight of a new measurement, once there are so many that their mean weighs each less."""

SLOPE = 0.05
"""What a further column costs, as a share of a step of one, as long as nothing is known."""

OUTLIER = 3.0
"""A step that takes so many times what was expected was disturbed, or compiled something."""


class Costs:
    """Seconds of a step by the columns that it feeds: averages where measured, lines between.

    Never falling with the width: a wider step that seems cheaper is noise.
    """

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.seconds: list[float] = []
        self.counts: list[int] = []
        self.doubtful: set[int] = set()

    def known(self, width: int) -> int:
        """How often a width was measured."""
        place = bisect_left(self.widths, width)
        there = place < len(self.widths) and self.widths[place] == width
        return self.counts[place] if there else 0

    def add(self, width: int, seconds: float) -> float:
        """A measurement; the seconds that count, which for an outlier are what was expected."""
        place = bisect_left(self.widths, width)
        strange = bool(self.widths) and seconds > OUTLIER * float(self.at([width])[0])
        if not self.known(width):
            if strange and width not in self.doubtful:
                self.doubtful.add(width)
                return float(self.at([width])[0])
            self.widths.insert(place, width)
            self.seconds.insert(place, seconds)
            self.counts.insert(place, 1)
            return seconds
        old, count = self.seconds[place], self.counts[place]
        seconds = OUTLIER * old if strange else seconds
        # The first step of a width may have compiled it or found its memory: the second knows.
        share = max(NEW, 1 / count)
        new = min(old, seconds) if count == 1 else old + share * (seconds - old)
        self.seconds[place], self.counts[place] = new, count + 1
        return old if strange else seconds

    def at(self, widths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Expected seconds at each width; needs one measurement at least."""
        asked = np.asarray(widths, dtype=np.float64)
        known, seconds = np.array(self.widths), np.maximum.accumulate(self.seconds)
        if len(known) == 1:
            slope = SLOPE * seconds[0]
        else:
            slope = (seconds[-1] - seconds[0]) / (known[-1] - known[0])
        beyond = np.maximum(asked - known[-1], 0) * slope
        return np.asarray(np.interp(asked, known, seconds) + beyond)
