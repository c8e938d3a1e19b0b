"""Layers that a token passes by where a router says so.

Sources: Raposo et al., "Mixture-of-Depths" (2024); Zhang et al., "p-MoD" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DecodePlan, DepthRecord, Returned, record
from ....ir.plan.bounds import Filled, Place, Share
from ....ir.support.errors import InputError
from ....runtime.depth.base import DEPTHS, DepthPolicy, StepFeed
from ....runtime.feeding.outputs import Outputs


@record
@dataclass(frozen=True)
class MixtureDepth(DepthRecord):
    """A trained router before some layers says whether a token runs through them (mixture of
    depths).

    functions: for each routed layer what makes its cache rows alone, of the state that a token
    passes by with. routers: for each the segment before it. routed: places of those layers among
    the step's segments, which are a layer each. shares: of the tokens of a window that run through
    each, in training. threshold: of the score, above which a token does. score: what routers
    return, the probability that the token is among those, [B,T]. Prompts run through all layers,
    and a batch runs through a layer if one of its tokens does. Sources: Raposo et al.,
    "Mixture-of-Depths" (2024); Zhang et al., "p-MoD" (2024).
    """

    functions: Filled[tuple[str, ...]] = ("step.1.fill",)
    routers: Filled[tuple[str, ...]] = ("step.0",)
    routed: Filled[tuple[Place, ...]] = (1,)
    shares: Filled[tuple[Share, ...]] = (0.5,)
    threshold: Share = 0.5
    score: Filled[str] = "route"
    trained: Filled[bool] = False
    kind: ClassVar[str] = "mixture"

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` unless each routed layer has a segment before
        and behind it, and what fills it."""
        *segments, _ = plan.step.parts or ("", "")
        within = all(0 < place < len(segments) - 1 for place in self.routed)
        if not within or not len(self.functions) == len(self.routed) == len(self.shares):
            raise InputError(
                f"{self.brief} routes places {self.routed} of {len(segments)} segments, with "
                f"{len(self.functions)} functions and {len(self.shares)} shares: expected one each "
                f"for places between the first and the last"
            )
        yield from ((function, {}) for function in self.functions)
        yield from ((router, {self.score: ("", "")}) for router in self.routers)


@DEPTHS.register(MixtureDepth)
class MixturePolicy(DepthPolicy):
    """Asks before each routed layer; a layer that all pass by makes its cache rows alone."""

    record: MixtureDepth

    def feed(self, step: StepFeed) -> Outputs:
        self.ran = self.total
        if any(len(row) > 1 for row in step.rows):  # drafts are verified by all layers
            return super().feed(step)
        record, score = self.record, self.record.score
        live = [index for index, text in enumerate(self.texts) if not text.done]
        fills = dict(zip(record.routed, record.functions, strict=True))
        waiting: list[str] = []
        for place, part in enumerate(self.parts):
            if place in fills:
                said = self.feeder.run_parts(waiting, step, (score,))[score]
                waiting = []
                if not bool((said[live, 0] > record.threshold).any()):
                    part = fills[place]
                    self.ran -= self.sizes[place]
            waiting.append(part)
        return self.feeder.run_parts([*waiting, self.head], step, step.fetch)
