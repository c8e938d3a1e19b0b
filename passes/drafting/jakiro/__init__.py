"""A drafter with a cache whose last call predicts two levels.

Source: Huang et al., "Jakiro: Boosting Speculative Decoding with Decoupled Multi-Head via MoE"
(2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from ....ir.plan import DecodePlan, DraftRecord, HeadsDraft, Returned, TwofoldDraft, record
from ....ir.plan.bounds import Factor, Filled
from ....ir.support.errors import InputError
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.continued import ContinuedProposer


@record
@dataclass(frozen=True)
class AheadDraft(TwofoldDraft):
    """A drafter with a cache, whose last call predicts two levels (Jakiro).

    first: its function also returns ``ahead`` [B,T,H], the state that a token two places on is
    predicted from. then: a `HeadsDraft` of one level, whose function takes the ``ahead`` that the
    call made for a node's parent. later: in training, the weight of what `then` predicts. noise:
    whether the features that go in get some in training.
    """

    then: Filled[DraftRecord] = field(default_factory=partial(HeadsDraft, levels=1))
    later: Factor = 0.5
    noise: bool = True
    trained: Filled[bool] = False
    kind: ClassVar[str] = "ahead"

    def check(self) -> None:
        super().check()
        if self.then.levels != 1 or type(self.then) is not HeadsDraft:
            raise InputError(
                f"draft=ahead: expected heads of one level then, got {self.then.kind} of "
                f"{self.then.levels}"
            )

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.first.function, {"ahead": ("", "", "")}


@PROPOSERS.register(AheadDraft)
class AheadProposer(ContinuedProposer):
    """Siblings of the last level share what their parent's call predicted two places on."""

    record: AheadDraft
    state = "ahead"
