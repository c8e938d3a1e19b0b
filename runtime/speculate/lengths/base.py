"""What a length policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ....ir.execution.executable import Executable
from ....ir.plan import FixedLength
from ...feeding.draft import VerifiedStep
from ...registry import Registry
from ..level import Ids, Level
from ..ready_chains import ReadyChains

Flags: TypeAlias = npt.NDArray[np.bool_]


class LengthPolicy:
    """Bounds drafts before and while they are made, and learns from what came of them; here drafts
    are as long as the plan and the texts' limits allow.

    most: draft tokens of the plan. wants: outputs of the step function that `observe` needs.
    Register a subclass with ``@LENGTHS.register(ItsRecord)`` in its own file of this folder.
    """

    wants: tuple[str, ...] = ()

    def __init__(self, record: Any, executable: Executable, batch: int) -> None:
        self.record, self.executable, self.batch = record, executable, batch
        self.most = executable.program.plan.most
        self.always = np.ones(batch, dtype=np.bool_)

    @property
    def learns(self) -> bool:
        """Whether it wants to be told what came of steps."""
        return type(self).observe is not LengthPolicy.observe

    def limits(self, rooms: Sequence[int]) -> list[int]:
        """Draft tokens wanted for each sequence; 0: do not speculate. rooms: levels that fit."""
        return [self.most if room > 0 else 0 for room in rooms]

    def goes_on(self, level: Level, depth: int) -> Flags:
        """For each sequence, whether a draft whose level number `depth` this is should grow deeper.

        The level becomes part of the draft either way. In a tree its first node continues the
        likeliest path. Returns bool[B].
        """
        return self.always

    def chose(self, tokens: Ids) -> None:
        """Before `goes_on`: the tokens i64[B] that chains have at its level, -1 for none."""

    def chains(self) -> ReadyChains | None:
        """What says how much of chains that lie ready a step verifies; None: it is to be asked step
        by step, see `limits`."""
        return ReadyChains() if type(self) is LengthPolicy else None

    def made_chains(self) -> ReadyChains | None:
        """The same of chains that the step before has made."""
        return None if self.record.gives_up else self.chains()

    def rest(self) -> int:
        """Steps from now on in which nothing will be drafted, whatever they yield."""
        return 0

    def rested(self, steps: int, seconds: float) -> None:
        """So many were made in so many seconds, one token each, without calls of `observe`."""

    def prepared(self, seconds: float) -> None:
        """Before a draft: what it took to bring the drafter up to a text that had gone on without
        drafts, or begins."""

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        """After each step. drafting: seconds that the drafts took; step: the step and its check."""


class DelegatingPolicy(LengthPolicy):
    """Base of policies that hold another one, `of`, and do what it does."""

    def __init__(self, of: LengthPolicy) -> None:
        self.record, self.executable, self.batch = of.record, of.executable, of.batch
        self.most, self.always, self.of = of.most, of.always, of
        self.wants = of.wants

    def limits(self, rooms: Sequence[int]) -> list[int]:
        return self.of.limits(rooms)

    def chose(self, tokens: Ids) -> None:
        self.of.chose(tokens)

    def goes_on(self, level: Level, depth: int) -> Flags:
        return self.of.goes_on(level, depth)

    def rest(self) -> int:
        return self.of.rest()

    def rested(self, steps: int, seconds: float) -> None:
        self.of.rested(steps, seconds)

    def prepared(self, seconds: float) -> None:
        self.of.prepared(seconds)

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        self.of.observe(taken, drafting, step)


LENGTHS: Registry[LengthPolicy] = Registry(__package__)
LENGTHS.register(FixedLength)(LengthPolicy)
