"""Draft records of the target without some of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from .base import Returned, policy
from .bounds import Levels, Nodes, Part, Seed, Share
from .draft import DraftRecord

if TYPE_CHECKING:
    from .decode import DecodePlan
    from .step import StepRecord


@dataclass(frozen=True)
class SkippingDraft(DraftRecord):
    """Base of records by which a draft leaves out some segments of a step that is cut.

    share: of the segments that hold nothing of the first nor the last layer, how many are left out.
    levels: tokens drafted at most. Verification runs all segments, and writes the rows of drafted
    tokens anew. A batch leaves out the same ones.
    """

    share: Part = 0.4
    levels: Levels = 4
    requires: ClassVar[frozenset[str]] = frozenset({"segments"})
    grows: ClassVar[bool] = True
    narrow: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    always: ClassVar[bool] = True

    def count(self, step: StepRecord) -> int:
        """Segments that are left out of a step."""
        return max(round(self.share * len(step.inner)), 1)

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` where no segment may be left out."""
        if plan.step.in_parts and not plan.step.inner:
            raise InputError(
                f"{self.brief} leaves out segments that hold nothing of the first nor the last "
                f"layer, and step={plan.step.brief} has none: set cut_depth.every=1"
            )
        yield from ()


@policy
@dataclass(frozen=True)
class LikestSkippingDraft(SkippingDraft):
    """The target's layers without those that change its states least (CLaSp, Chen et al. 2025).

    Before a draft, but every `period` steps only, the segments to leave out follow from the last
    token that went through all of them: of all ways to leave j of the first i out, the one is kept
    whose state is most like the whole one's, by cosine, and goes on through segment i + 1, or past
    it (a dynamic program). share: of the segments that hold nothing of the first nor the last
    layer, how many are left out. levels: tokens drafted at most. A batch leaves out the same ones.
    """

    period: Levels = 1
    kind: ClassVar[str] = "likest_skipping"
    requires: ClassVar[frozenset[str]] = frozenset({"segments", "trees"})


@policy
@dataclass(frozen=True)
class SearchedSkippingDraft(SkippingDraft):
    """The target's layers without those that are found by search not to matter (SWIFT, Xia 2024).

    While decoding, other choices of segments are tried on the text's own last tokens: one that
    predicts more of them than the choice in use takes its place. Most are drawn by chance, and
    every `guided`-th where a Gaussian process over the earlier ones expects most. share: of the
    segments that hold nothing of the first nor the last layer, how many are left out. levels:
    tokens drafted at most. window: tokens that a choice is tried on. period: steps from one try to
    the next. tries: before the search ends; enough: the share of tokens predicted that ends it,
    too. What was found is kept as long as the model is. A batch leaves out the same ones.
    """

    window: Nodes = 32
    period: Levels = 1
    tries: Nodes = 100
    guided: Levels = 25
    enough: Share = 0.95
    seed: Seed = 0
    kind: ClassVar[str] = "searched_skipping"
