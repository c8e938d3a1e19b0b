"""The draft record of heads that go on where a drafter with a cache stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..support.errors import InputError
from .base import record
from .bounds import Amount, Factor, Filled
from .draft import CachedDraft, DraftRecord, HeadsDraft, LearningDraft


@dataclass(frozen=True)
class TwofoldDraft(LearningDraft):
    """Base of records of a drafter with a cache, which predicts the first levels, and of heads that
    predict the ones below from what it made.

    first: takes an output of the step. then: what predicts the rest.
    """

    first: Filled[CachedDraft] = field(default_factory=CachedDraft)
    then: Filled[DraftRecord] = field(default_factory=HeadsDraft)
    grows: ClassVar[bool] = True

    def check(self) -> None:
        if not self.then.goes_on:
            raise InputError(f"{self.then.kind} cannot go on where {self.first.kind} stops")

    @property
    def core(self) -> CachedDraft:
        """`first`; `then` starts from the states that it makes."""
        return self.first

    @property
    def cached(self) -> tuple[str, ...]:
        return (*self.first.cached, *self.then.cached)

    @property
    def levels(self) -> int:
        return self.first.levels + self.then.levels


@record
class ContinuedDraft(TwofoldDraft):
    """A drafter with a cache predicts the first levels, heads the ones below (Clover, Gumiho).

    first: see `TwofoldDraft`. then: `HeadsDraft` or `RecurrentDraft`, whose function takes
    the ``hidden`` that `first` made of a node's parent where others take the target's last state.

    In training a level's loss is `token` times that of its token and `feature` times the distance
    between what the head reads of it and the step's output `near`, which the target's own head
    reads; levels of `first` weigh `decay` to the power of the level, and those of `then` as much as
    that one says, times `later`. What a head reads is the ``feature`` that a function returns,
    ``hidden`` where there is none. noise: whether the states that go in get some (EAGLE).
    """

    token: Factor = 1.0
    feature: Amount = 0.0
    near: Filled[str | None] = None
    later: Factor = 0.8
    decay: Factor = 0.8
    noise: bool = False
    trained: Filled[bool] = False
    kind: ClassVar[str] = "continued"
