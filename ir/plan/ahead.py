"""The draft record of a drafter with a cache that predicts two levels at once in the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from .base import Returned, record
from .bounds import Factor, Filled
from .continued import TwofoldDraft
from .draft import DraftRecord, HeadsDraft

if TYPE_CHECKING:
    from .decode import DecodePlan


@record
@dataclass(frozen=True)
class AheadDraft(TwofoldDraft):
    """A drafter with a cache, whose last call predicts two levels (Jakiro).

    first: its function also returns ``ahead`` [B,T,H], the state that a token two places on is
    predicted from. then: a `HeadsDraft` of one level, whose function takes the ``ahead`` that the
    call made for a node's parent. later: in training, the weight of what `then` predicts. noise:
    whether the features that go in get some in training. trained: whether the weights of both know
    anything.
    """

    then: Filled[DraftRecord] = field(default_factory=partial(HeadsDraft, levels=1))
    later: Factor = 0.5
    noise: bool = True
    trained: Filled[bool] = False
    kind: ClassVar[str] = "ahead"

    def check(self) -> None:
        """See `Record.check`."""
        super().check()
        if self.then.levels != 1 or self.then.kind != "heads":
            raise InputError(
                f"draft=ahead: expected heads of one level then, got {self.then.kind} of "
                f"{self.then.levels}"
            )

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`."""
        yield self.first.function, {"ahead": ("", "", "")}
