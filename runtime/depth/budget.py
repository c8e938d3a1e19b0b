"""Layers by a token's place: later ones run through fewer.

A budget only falls, so what a token left out no later one reads. Sources: Del Corro et al.,
"SkipDecode" (2023); Fan et al., "Position-Aware Depth Decay Decoding" (2025).
"""

from __future__ import annotations

from ...ir.plan import DecayBudget, LinearBudget
from ..feeding.outputs import Outputs
from .base import DEPTHS, DepthPolicy, StepFeed


@DEPTHS.register(LinearBudget)
@DEPTHS.register(DecayBudget)
class BudgetPolicy(DepthPolicy):
    """The first segment, and as many of the last ones as the budget allows."""

    record: LinearBudget | DecayBudget

    def feed(self, step: StepFeed) -> Outputs:
        """See `DepthPolicy.feed`."""
        # The shallowest place of the batch: a deeper one would read rows that it has not.
        place = max(text.generated - 1 for text in self.texts if not text.done)
        chosen = self.chosen(self.record.layers(place, self.total))
        self.ran = sum(self.sizes[index] for index in chosen)
        parts = (*(self.parts[index] for index in chosen), self.head)
        return self.feeder.run_parts(
            parts, step.rows, step.past, step.starts, step.width, step.fetch, step.trees
        )

    def chosen(self, budget: int) -> list[int]:
        """The segments that run, by their places."""
        kept, left = [0], budget - self.sizes[0]
        for index in range(len(self.parts) - 1, 0, -1):
            if self.sizes[index] > left:
                break
            kept.append(index)
            left -= self.sizes[index]
        return sorted(kept)
