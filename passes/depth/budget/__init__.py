"""Layers by a token's place: later ones run through fewer.

A budget only falls, so what a token left out no later one reads. Sources: Del Corro et al.,
"SkipDecode" (2023); Fan et al., "Position-Aware Depth Decay Decoding" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DepthRecord, policy
from ....ir.plan.bounds import Levels, Nodes, Part, Rollout
from ....ir.support.errors import InputError
from ....runtime.depth.base import DEPTHS, DepthPolicy, StepFeed
from ....runtime.feeding.outputs import Outputs


def floor(least: float, total: int) -> int:
    """Layers that always run, of `total`.

    >>> floor(2, 30), floor(0.5, 30), floor(0.01, 30)
    (2, 15, 1)
    """
    return least if isinstance(least, int) else max(int(total * least), 1)


@policy
@dataclass(frozen=True)
class LinearBudget(DepthRecord):
    """Layers fall linearly with a token's place behind the prompt (SkipDecode, Del Corro 2023).

    The first segment runs for every token, and of the others the last ones, as many as the budget
    allows: the middle is left out. A batch shares one budget, that of its shallowest place. Prompts
    run through all layers. most, least: layers of the first token and of those from `tokens` on;
    most=0: all there are.
    """

    most: Rollout = 0
    least: Levels | Part = 2
    tokens: Nodes = 256
    kind: ClassVar[str] = "linear"

    def check(self) -> None:
        if self.most and self.most < self.least:
            raise InputError(f"least={self.least} is more than most={self.most}")

    def layers(self, place: int, total: int) -> int:
        """Layers of the token at a place, of `total`."""
        most, along = self.most or total, min(place / self.tokens, 1.0)
        return int(most - (most - floor(self.least, total)) * along)


@policy
@dataclass(frozen=True)
class DecayBudget(DepthRecord):
    """Of L layers floor(L alpha^i) for the i-th token behind the prompt (D3, Fan et al. 2025).

    alpha: at most 1. least: layers that always run, or their share. Which ones, and what batches
    and prompts do: as in `LinearBudget`.
    """

    alpha: Part = 0.998
    least: Levels | Part = 2
    kind: ClassVar[str] = "decay"

    def layers(self, place: int, total: int) -> int:
        """Layers of the token at a place, of `total`."""
        return max(int(total * self.alpha**place), floor(self.least, total))


@DEPTHS.register(LinearBudget)
@DEPTHS.register(DecayBudget)
class BudgetPolicy(DepthPolicy):
    """The first segment, and as many of the last ones as the budget allows."""

    record: LinearBudget | DecayBudget

    def feed(self, step: StepFeed) -> Outputs:
        # The shallowest place of the batch: a deeper one would read rows that it has not.
        place = max(text.generated - 1 for text in self.texts if not text.done)
        places = chosen(self.sizes, self.record.layers(place, self.total))
        self.ran = sum(self.sizes[index] for index in places)
        parts = (*(self.parts[index] for index in places), self.head)
        return self.feeder.run_parts(parts, step, step.fetch)


def chosen(sizes: Sequence[int], budget: int) -> list[int]:
    """The segments that run within a budget of layers, by their places: the first, and as many of
    the last as there is room for. sizes: layers of each.

    >>> chosen([1, 1, 1, 1], 3)
    [0, 2, 3]
    """
    kept, left = [0], budget - sizes[0]
    for index in range(len(sizes) - 1, 0, -1):
        if sizes[index] > left:
            break
        kept.append(index)
        left -= sizes[index]
    return sorted(kept)
