"""Leave at the first exit that is sure; what deeper caches lack is made of the state there.

Sources: Schuster et al., "Confident Adaptive Language Modeling" (CALM, 2022); Valade, "Accelerating
Large Language Model Inference with Self-Supervised Early Exits" (2024), for heads at exits.
"""

from __future__ import annotations

from ...ir.plan import ConfidentDepth, HeadsDepth
from ..feeding.outputs import Outputs
from .base import DEPTHS, DepthPolicy, StepFeed
from .sure import all_sure, margins, may_leave


@DEPTHS.register(ConfidentDepth)
class ConfidentPolicy(DepthPolicy):
    """Runs segment by segment, and asks after each but the last."""

    record: ConfidentDepth

    def feed(self, step: StepFeed) -> Outputs:
        """See `DepthPolicy.feed`."""
        self.ran = self.total
        score, live = self.record.score, [i for i, text in enumerate(self.texts) if not text.done]
        drafts = any(len(row) > 1 for row in step.rows)  # are verified by all layers
        if drafts or not may_leave(self.record, self.texts, live):
            return super().feed(step)
        for index, part in enumerate(self.parts[:-1]):
            made = self.run_parts((part,), step, (score,) if score else ())
            # A copy: outputs live until the next run.
            sure = made[score][live, 0].tolist() if score else None
            if sure is not None and not all_sure(self.record, self.texts, live, sure):
                continue
            fetch = step.fetch if score else tuple(dict.fromkeys(("logits", *step.fetch)))
            outputs = self.run_parts((self.head_at(index),), step, fetch)
            if sure is None and not self._wide_apart(outputs, live):
                continue
            self.ran = sum(self.sizes[: index + 1])
            self.run_parts(self.record.functions[index:], step, ())
            return outputs
        return self.run_parts((self.parts[-1], self.head), step, step.fetch)

    def head_at(self, exit: int) -> str:
        """What makes logits of the state behind a part."""
        return self.head

    def _wide_apart(self, outputs: Outputs, live: list[int]) -> bool:
        return all_sure(self.record, self.texts, live, margins(outputs, live))


@DEPTHS.register(HeadsDepth)
class HeadsPolicy(ConfidentPolicy):
    """The same, asking each exit's own head."""

    record: HeadsDepth

    def head_at(self, exit: int) -> str:
        """See `ConfidentPolicy.head_at`."""
        return self.record.heads[exit]
