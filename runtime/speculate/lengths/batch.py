"""One length for a batch, which follows its best text."""

from __future__ import annotations

import numpy as np

from ....ir.execution.executable import Executable
from ....ir.plan import BatchLength
from ...feeding.draft import VerifiedStep
from .base import LENGTHS
from .depths import SequenceDepths


@LENGTHS.register(BatchLength)
class BatchPolicy(SequenceDepths):
    """Longer after a step in which some text accepted its whole draft, shorter after any other.

    length: of the next drafts, in tokens; in a tree, levels. shrank: 1 after a step that made it
    shorter, else 0. Source: Qian et al., "BASS: Batched Attention-optimized Speculative Sampling"
    (2024), algorithm 1: start, rise, shrink and limit are its l0, l_incre, l_mod and l_limit.
    """

    record: BatchLength

    def __init__(self, record: BatchLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.length, self.shrank = record.start, 0
        self._set()

    def _set(self) -> None:
        self.depths = np.full(self.batch, self.length)

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        record = self.record
        drafted = [
            max(draft.shape.depths[: len(draft.tokens)]) for draft in taken.drafts if draft.tokens
        ]
        if not drafted:
            return
        accepted = max(map(len, taken.paths))
        # Plan, room and drafter may allow less than the rule: what was drafted is whole, too.
        if accepted >= min(self.length, max(drafted)):
            self.length = min(self.length + record.rise, record.limit)
            self.shrank = 0
        else:
            shorter = self.length - -(-self.length // record.shrink) - self.shrank
            self.length = max(record.least, accepted, shorter)
            self.shrank = 1
        self._set()
