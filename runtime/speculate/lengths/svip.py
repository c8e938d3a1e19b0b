"""Stop where the draft is unsure of itself."""

from __future__ import annotations

import numpy as np

from ....ir.plan import SvipLength
from ..level import Level, Scores
from .base import LENGTHS, Flags, LengthPolicy


@LENGTHS.register(SvipLength)
class SvipPolicy(LengthPolicy):
    """Bounds the chance of acceptance by the entropy of the draft's own prediction.

    Source: Zhang et al., "Draft Model Knows When to Stop: A Self-Verification Length Policy for
    Speculative Decoding" (SVIP, 2024).
    """

    record: SvipLength

    def goes_on(self, level: Level, depth: int) -> Flags:
        bound = np.exp(-self.record.scale * np.sqrt(entropy(level)))
        flags: Flags = bound > self.record.threshold
        return flags


def entropy(level: Level) -> Scores:
    """Of the prediction after each sequence's likeliest path, in nats, f32[B].

    From whole distributions if the proposer has them; else from its candidates, with the rest of
    the probability as one more candidate: a lower bound.
    """
    if level.logits is not None:
        logits = level.logits[:, 0].astype(np.float64)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        probs = weights / weights.sum(-1, keepdims=True)
    else:
        known = np.where(level.tokens[:, 0] < 0, 0.0, np.exp(level.scores[:, 0]))
        rest = np.maximum(1 - known.sum(-1, keepdims=True), 0)
        probs = np.concatenate([known, rest], -1)
    found: Scores = -(probs * np.log(np.maximum(probs, 1e-30))).sum(-1)
    return np.maximum(found, 0)
