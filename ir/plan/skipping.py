"""Draft records of the target without some of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from .base import Returned
from .bounds import Levels, Part
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
