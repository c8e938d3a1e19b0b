"""Stop where a trained head expects a rejection.

Source: Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths"
(2024). The head here looks at the target's state that the draft starts from, once a step, and
speaks of all levels at once, so that it works with any drafter and costs one small product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...ir.executable import Executable
from ...ir.plan import AcceptanceLength, Chain
from ..last_state import LastState
from .base import LENGTHS, Flags, LengthPolicy

if TYPE_CHECKING:
    from ..drafters.base import Taken
    from ..proposers.base import Level


@LENGTHS.register(AcceptanceLength)
class AcceptancePolicy(LengthPolicy):
    """The first level after which some token is rejected with more than the threshold's chance is
    the last one. Of the prompt nothing is asked: the first draft is as long as it may be."""

    record: AcceptanceLength

    def __init__(self, record: AcceptanceLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.wants = (record.output,)
        self.chain = isinstance(executable.program.plan.tree, Chain)
        self.depths = np.full(batch, record.levels)
        self.last = LastState(record.output, batch)

    def limits(self, rooms: Sequence[int]) -> list[int]:
        """See `LengthPolicy.limits`. In a tree the depth is limited, not the nodes."""
        wanted = self.depths.tolist() if self.chain else [self.most] * self.batch
        return [
            min(count, self.most) if room > 0 else 0
            for count, room in zip(wanted, rooms, strict=True)
        ]

    def goes_on(self, level: Level, depth: int) -> Flags:
        """See `LengthPolicy.goes_on`."""
        flags: Flags = self.depths > depth
        return flags

    def observe(self, taken: Taken, drafting: float, step: float) -> None:
        """Ask the head about the state that each sequence's last token was chosen from."""
        self.last.observe(taken)
        inputs = {"hidden": self.last.get()[1]}
        odds = self.executable.run(self.record.function, inputs, ("accepted",))["accepted"]
        whole = odds[:, 0].float().sigmoid().cumprod(-1).cpu().numpy()
        # P(any rejected) = 1 - the chance that all so far are accepted.
        going = whole >= 1 - self.record.threshold
        self.depths = np.minimum(1 + going.sum(-1), self.record.levels)
