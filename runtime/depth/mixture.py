"""Layers that a token passes by where a router says so.

Sources: Raposo et al., "Mixture-of-Depths" (2024); Zhang et al., "p-MoD" (2024).
"""

from __future__ import annotations

from ...ir.plan import MixtureDepth
from ..feeding.outputs import Outputs
from .base import DEPTHS, DepthPolicy, StepFeed


@DEPTHS.register(MixtureDepth)
class MixturePolicy(DepthPolicy):
    """Asks before each layer that has a router; a layer that everyone passes by makes its cache
    rows alone."""

    record: MixtureDepth

    def feed(self, step: StepFeed) -> Outputs:
        """See `DepthPolicy.feed`."""
        self.ran = self.total
        if any(len(row) > 1 for row in step.rows):  # drafts are verified by all layers
            return super().feed(step)
        record, score = self.record, self.record.score
        live = [index for index, text in enumerate(self.texts) if not text.done]
        fills = dict(zip(record.routed, record.functions, strict=True))
        waiting: list[str] = []
        for place, part in enumerate(self.parts):
            if place in fills:
                said = self.run_parts(waiting, step, (score,))[score]
                waiting = []
                if not bool((said[live, 0] > record.threshold).any()):
                    part = fills[place]
                    self.ran -= self.sizes[place]
            waiting.append(part)
        return self.run_parts([*waiting, self.head], step, step.fetch)
