"""Depth records: how many layers a token runs through."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from .base import Record, record, untrained
from .bounds import Amount, Place, Share
from .contract import Contract

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan


@dataclass(frozen=True)
class DepthRecord(Record):
    """Base of depth records.

    stops: not every token runs through every layer; parted: so the step must be cut. halves: it
    runs attention without MLPs, so the step must be cut between them.
    """

    slot: ClassVar[str] = "depth"
    noun: ClassVar[str] = "depth policy"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"segments"})
    stops: ClassVar[bool] = True
    parted: ClassVar[bool] = True
    halves: ClassVar[bool] = False

    @property
    def acts(self) -> bool:
        """Whether it stops any token as it stands. What is untrained knows nothing, so every token
        runs through every layer until somebody trains it."""
        return self.stops and not untrained([self])

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that calls of deeper layers often have, besides those of steps: one more than
        `pending`, the tokens that may lack rows, if there is such a field."""
        pending: int | None = getattr(self, "pending", None)
        return () if pending is None else (pending + 1,)

    def ending(self, plan: DecodePlan) -> str:
        """The function that ends any step, however few layers it runs through."""
        return plan.step.parts[-1]


@record
class FullDepth(DepthRecord):
    """Every token runs through every layer."""

    kind: ClassVar[str] = "full"
    requires: ClassVar[frozenset[str]] = frozenset()
    stops: ClassVar[bool] = False


@dataclass(frozen=True)
class ThresholdDepth(DepthRecord):
    """Base of records that let tokens leave where the first layers are sure.

    threshold: of their confidence, at the first place; at place t of N it is 0.9 threshold + 0.1
    threshold exp(-`decay` t / N), so with decay=0 the same everywhere (as in FREE's code; in CALM,
    Schuster et al. 2022, the second term is 0.1 exp(-decay t / N), whatever the threshold).
    tokens: the first so many new tokens of a text may be written early, those behind them run
    through all layers, and N is that number: what a threshold promises, it promises of texts of one
    length. 0: all may, and N is what a call asks for.
    """

    threshold: Share = 0.9
    decay: Amount = 0.0
    tokens: Place = 0

    def bound(self, along: float) -> float:
        """The threshold where so large a share of the text is written, 0..1.

        >>> round(ThresholdDepth(threshold=0.8, decay=4.0).bound(0.5), 4)
        0.7308
        """
        return self.threshold * (0.9 + 0.1 * math.exp(-self.decay * along))

    def fixed(self, threshold: float, tokens: int) -> Self:
        """The record with a threshold that stays, for so many new tokens."""
        return replace(self, threshold=threshold, tokens=tokens)
