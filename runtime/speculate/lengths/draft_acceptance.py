"""Stop where a trained head on the draft's own states expects a rejection."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....ir.execution.executable import Executable
from ....ir.plan import DraftAcceptanceLength
from ..level import Level
from .base import LENGTHS, Flags, LengthPolicy


@LENGTHS.register(DraftAcceptanceLength)
class DraftAcceptancePolicy(LengthPolicy):
    """Multiplies up the chances that the tokens of a draft are accepted. A level says it of the
    tokens that it was made from, so the last token of a draft is one that nothing is known of.

    Source: Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths"
    (2024).
    """

    record: DraftAcceptanceLength

    def __init__(self, record: DraftAcceptanceLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.whole: npt.NDArray[np.float64] = np.ones(batch)

    def goes_on(self, level: Level, depth: int) -> Flags:
        """See `LengthPolicy.goes_on`. The first level is made from a token of the text."""
        if depth == 1:
            self.whole = np.ones(self.batch)
        elif level.odds is not None:
            self.whole *= 1 / (1 + np.exp(-level.odds[:, 0].astype(np.float64)))
        flags: Flags = 1 - self.whole <= self.record.threshold
        return flags
