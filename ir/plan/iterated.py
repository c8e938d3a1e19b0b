"""Draft records that need no second model: guesses iterated beside the text, and input copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Returned
from .draft import DraftRecord

if TYPE_CHECKING:
    from .decode import DecodePlan


@dataclass(frozen=True)
class GuessDraft(DraftRecord):
    """Base of drafts that the step's ``argmax`` (pass add_argmax) corrects at every place."""

    reads: ClassVar[tuple[str, ...]] = ("argmax",)
    always: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield plan.step.plain, {"argmax": ("", "")}
