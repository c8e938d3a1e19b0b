"""Stop at the first token that the draft holds for improbable."""

from __future__ import annotations

import numpy as np

from ....ir.plan import ConfidenceLength
from ..level import Level
from .base import LENGTHS, Flags, LengthPolicy


@LENGTHS.register(ConfidenceLength)
class ConfidencePolicy(LengthPolicy):
    """Asks the draft's best candidate for its probability.

    Source: Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting"
    (2024).
    """

    record: ConfidenceLength

    def goes_on(self, level: Level, depth: int) -> Flags:
        if depth >= self.record.depth:
            return ~self.always
        # A float32 logarithm of the threshold itself still counts as reaching it.
        sure: Flags = level.scores[:, 0, 0] >= np.log(self.record.threshold) - 1e-6
        flags: Flags = sure & (level.tokens[:, 0, 0] >= 0)
        return flags
