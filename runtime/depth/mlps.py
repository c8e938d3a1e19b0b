"""No more MLPs for a token that one of them has left as it was.

Source: Jaiswal et al., "FFN-SkipLLM: A Hidden Gem for Autoregressive Decoding with Adaptive Feed
Forward Skipping" (2024).
"""

from __future__ import annotations

from ...ir.plan import MlpDepth
from ..feeding.outputs import Outputs
from .base import DEPTHS, DepthPolicy, StepFeed

HALF = 0.5
"""Of a layer, what its MLP counts."""


@DEPTHS.register(MlpDepth)
class MlpPolicy(DepthPolicy):
    """Asks each MLP that may be left out, until one of them says that the others may be."""

    record: MlpDepth

    def feed(self, step: StepFeed) -> Outputs:
        """See `DepthPolicy.feed`."""
        self.ran = self.total
        record = self.record
        live = [index for index, text in enumerate(self.texts) if not text.done]
        new = any(self.texts[index].generated <= record.warm for index in live)
        if new or any(len(row) > 1 for row in step.rows):  # drafts are verified by all of it
            return super().feed(step)
        places = set(record.places(self.executable.program.plan.step))
        waiting: list[str] = []
        idle = False
        for place, part in enumerate(self.parts):
            if idle and place in places:
                self.ran -= HALF
                continue
            waiting.append(part)
            if place in places and not idle:
                alike = self.run_parts(waiting, step, (record.score,))[record.score]
                idle = bool((alike[live, 0] > record.similarity).all())
                waiting = []
        return self.run_parts([*waiting, self.head], step, step.fetch)
