"""Stop where a trained head expects a rejection.

The rule is that of SpecDec++ (Huang et al., 2024; see `draft_acceptance`). The head here looks at
the target's state that the draft starts from, once a step, and speaks of all levels at once, so
that it works with any drafter and costs one small product.
"""

from __future__ import annotations

import numpy as np

from ....ir.execution.executable import Executable
from ....ir.plan import AcceptanceLength
from ...feeding.draft import VerifiedStep
from ..last_state import LastState
from .base import LENGTHS
from .depths import SequenceDepths


@LENGTHS.register(AcceptanceLength)
class AcceptancePolicy(SequenceDepths):
    """The first level after which some token is rejected with more than the threshold's chance is
    the last one. Of the prompt nothing is asked: the first draft is as long as it may be."""

    record: AcceptanceLength

    def __init__(self, record: AcceptanceLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.wants = (record.output,)
        self.depths = np.full(batch, record.levels)
        self.last = LastState(record.output, batch)

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        """Ask the head about the state that each sequence's last token was chosen from."""
        self.last.observe(taken)
        inputs = {"hidden": self.last.get()[1]}
        odds = self.executable.run(self.record.function, inputs, ("accepted",))["accepted"]
        whole = odds[:, 0].float().sigmoid().cumprod(-1).cpu().numpy()
        # P(any rejected) = 1 - the chance that all so far are accepted.
        going = whole >= 1 - self.record.threshold
        self.depths = np.minimum(1 + going.sum(-1), self.record.levels)
