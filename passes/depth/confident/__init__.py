"""Leave at the first exit that is sure; what deeper caches lack is made of the state there.

Sources: Schuster et al., "Confident Adaptive Language Modeling" (CALM, 2022); Valade, "Accelerating
Large Language Model Inference with Self-Supervised Early Exits" (2024), for heads at exits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DecodePlan, Returned, ThresholdDepth, record
from ....ir.plan.bounds import Filled
from ....ir.support.errors import InputError
from ....runtime.depth.base import DEPTHS, DepthPolicy, StepFeed
from ....runtime.depth.sure import all_sure, margins, may_leave
from ....runtime.feeding.outputs import Outputs


@record
@dataclass(frozen=True)
class ConfidentDepth(ThresholdDepth):
    """Leave at the first exit that is sure; deeper layers' rows are made of its state (CALM).

    functions: for each segment but the first one that makes its cache rows of the state that a
    token left with, as if its layers had not changed that. score: what each segment but the last
    returns of how sure it is, [B,T]; "": by how much the likeliest successor is more probable than
    the second, by the target's own head. A batch leaves together, or goes on together.
    """

    functions: Filled[tuple[str, ...]] = ("step.1.fill",)
    score: Filled[str] = ""
    kind: ClassVar[str] = "confident"

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` unless there is a function for each segment."""
        *segments, _ = plan.step.parts or ("", "")
        if len(self.functions) != len(segments) - 1:
            raise InputError(
                f"{self.brief} fills {len(self.functions)} segments, and step={plan.step.brief} "
                f"has {len(segments) - 1} behind the first"
            )
        yield from ((function, {}) for function in self.functions)
        if self.score:
            yield from ((segment, {self.score: ("", "")}) for segment in segments[:-1])


@DEPTHS.register(ConfidentDepth)
class ConfidentPolicy(DepthPolicy):
    """Runs segment by segment, and asks after each but the last."""

    record: ConfidentDepth

    def feed(self, step: StepFeed) -> Outputs:
        self.ran = self.total
        score, live = self.record.score, [i for i, text in enumerate(self.texts) if not text.done]
        drafts = any(len(row) > 1 for row in step.rows)  # are verified by all layers
        if drafts or not may_leave(self.record, self.texts, live):
            return super().feed(step)
        for index, part in enumerate(self.parts[:-1]):
            made = self.feeder.run_parts((part,), step, (score,) if score else ())
            # A copy: outputs live until the next run.
            sure = made[score][live, 0].tolist() if score else None
            if sure is not None and not all_sure(self.record, self.texts, live, sure):
                continue
            fetch = step.fetch if score else tuple(dict.fromkeys(("logits", *step.fetch)))
            outputs = self.feeder.run_parts((self.head_at(index),), step, fetch)
            if sure is None and not self._wide_apart(outputs, live):
                continue
            self.ran = sum(self.sizes[: index + 1])
            self.feeder.run_parts(self.record.functions[index:], step, ())
            return outputs
        return self.feeder.run_parts((self.parts[-1], self.head), step, step.fetch)

    def head_at(self, exit: int) -> str:
        """What makes logits of the state behind a part."""
        return self.head

    def _wide_apart(self, outputs: Outputs, live: list[int]) -> bool:
        return all_sure(self.record, self.texts, live, margins(outputs, live))
