"""No more MLPs for a token that one of them has left as it was.

Source: Jaiswal et al., "FFN-SkipLLM: A Hidden Gem for Autoregressive Decoding with Adaptive Feed
Forward Skipping" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DecodePlan, DepthRecord, Returned, StepRecord, record
from ....ir.plan.bounds import Filled, Rollout, Share
from ....ir.support.errors import InputError
from ....runtime.depth.base import DEPTHS, DepthPolicy, StepFeed
from ....runtime.feeding.outputs import Outputs


@record
@dataclass(frozen=True)
class MlpDepth(DepthRecord):
    """Once an MLP leaves a token as it was, it runs through no more of them (FFN-SkipLLM).

    similarity: of the states before and behind an MLP, by cosine, from which on the following ones
    are left out. first, last: layers whose MLPs run in any case. warm: tokens behind the prompt
    that run through all. score: what the segments of the other MLPs return of their similarity,
    [B,T]. Attention runs everywhere, so no cache row is lacking. A batch leaves them out together,
    or not at all. Source: Jaiswal et al., "FFN-SkipLLM" (2024).
    """

    similarity: Share = 0.98
    first: Rollout = 2
    last: Rollout = 2
    warm: Rollout = 8
    score: Filled[str] = "sure"
    kind: ClassVar[str] = "mlp"
    halves: ClassVar[bool] = True

    def places(self, step: StepRecord) -> tuple[int, ...]:
        """Of a step's parts those MLPs that may be left out."""
        layers = sorted(step.mlps)
        return tuple(step.mlps[n] for n in layers[self.first : len(layers) - self.last])

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` where fewer than two MLPs are between those that
        run in any case: the first of them decides."""
        places = self.places(plan.step)
        if plan.step.halves and len(places) < 2:
            raise InputError(
                f"{self.brief} lets the first {self.first} and the last {self.last} MLPs run, and "
                f"of the step's {len(plan.step.mlps)} that leaves {len(places)} to decide and to "
                f"be left out: expected two or more"
            )
        yield from ((plan.step.parts[place], {self.score: ("", "")}) for place in places)


HALF = 0.5
"""Of a layer, what its MLP counts."""


@DEPTHS.register(MlpDepth)
class MlpPolicy(DepthPolicy):
    """Asks each MLP that may be left out, until one of them says that the others may be."""

    record: MlpDepth

    def feed(self, step: StepFeed) -> Outputs:
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
                alike = self.feeder.run_parts(waiting, step, (record.score,))[record.score]
                idle = bool((alike[live, 0] > record.similarity).all())
                waiting = []
        return self.feeder.run_parts([*waiting, self.head], step, step.fetch)
