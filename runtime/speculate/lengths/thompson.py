"""Draw the length from what is believed about acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....ir.execution.executable import Executable
from ....ir.plan import ThompsonLength
from ...feeding.draft import VerifiedStep
from .base import LENGTHS
from .depths import SequenceDepths


@LENGTHS.register(ThompsonLength)
class ThompsonPolicy(SequenceDepths):
    """A Beta posterior of the chance that a draft token is accepted, a sequence each.

    Before a draft, chances are drawn from it, and tokens with those chances, until the first that
    would be rejected: that many are worth drafting, and one at least, so that there is always
    something to learn from. Source: Liu et al., "Speculative Decoding via Early-exiting for Faster
    LLM Inference with Thompson Sampling Control Mechanism" (EESD, 2024).
    """

    record: ThompsonLength

    def __init__(self, record: ThompsonLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.random = np.random.default_rng(record.seed)
        self.accepted = np.full(batch, record.accepted)
        self.rejected = np.full(batch, record.rejected)

    def limits(self, rooms: Sequence[int]) -> list[int]:
        shape = (max(self.most - 1, 1), self.batch)
        chances = self.random.beta(self.accepted, self.rejected, shape)
        going = np.cumprod(self.random.random(shape) < chances, axis=0)
        self.depths = 1 + going.sum(0)
        return super().limits(rooms)

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        results = zip(taken.drafts, taken.paths, taken.tokens, strict=True)
        for index, (draft, path, tokens) in enumerate(results):
            self.accepted[index] += len(path)
            # A text that ended within the draft says nothing about what came after.
            ended = len(tokens) <= len(path)
            if draft.tokens and not ended and len(path) < max(draft.shape.depths):
                self.rejected[index] += 1
