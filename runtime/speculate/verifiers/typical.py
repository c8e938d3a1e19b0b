"""Typical acceptance: where the target is unsure, many tokens are as good as the one it picks."""

from __future__ import annotations

import numpy as np

from ....ir.plan import Typical
from ..sampling import Array
from .base import GREEDY, SAMPLING, VERIFIERS
from .relaxed import RelaxedVerifier


@VERIFIERS.register(Typical, GREEDY)
@VERIFIERS.register(Typical, SAMPLING)
class TypicalVerifier(RelaxedVerifier):
    """A token passes if p reaches min(floor, share * exp(-entropy of p)).

    exp(-entropy) is at most the best token's p. Source: Cai et al., "Medusa: Simple LLM Inference
    Acceleration Framework with Multiple Decoding Heads" (2024), section 2.3.1.
    """

    record: Typical

    def bounds(self, probs: Array) -> Array:
        tiny = np.finfo(probs.dtype).tiny
        entropy = -(probs * np.log(np.maximum(probs, tiny))).sum(-1)
        bounds = np.minimum(self.record.floor, self.record.share * np.exp(-entropy))
        # Rounding must not stop the best token of a flat distribution.
        found: Array = np.minimum(bounds, probs.max(-1))
        return found
