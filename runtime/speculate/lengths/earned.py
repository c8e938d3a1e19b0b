"""The whole draft as long as drafts earn what they cost, or none: by tokens, never by time."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.execution.executable import Executable
from ....ir.plan import EarnedLength
from ...feeding.draft import VerifiedStep
from .base import LENGTHS, LengthPolicy

CREDIT = 1.0
"""Tokens that a text's drafts may have cost more than they brought before they are given up, """
MOST = 8.0
"""and those that they can have saved up against a stretch in which they bring less."""
FIRST, LONGEST = 16, 1024
"""Steps without drafts after which one is tried again: first, and at most."""


@LENGTHS.register(EarnedLength)
class EarnedPolicy(LengthPolicy):
    """Each text has an account: a step that is to draft adds the tokens that it yields less
    `least`, whether a draft came of it or not.

    Where it falls below zero the text takes plain steps, and then one draft decides: twice as long
    it rests if that does not pay, either. Nothing is learned from other texts, of the batch or of
    earlier calls, so a text depends on its prompt and the plan alone.
    """

    record: EarnedLength

    def __init__(self, record: EarnedLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.accounts, self.waits = [CREDIT] * batch, [FIRST] * batch
        self.steps, self.until = [0] * batch, [0] * batch
        self.over, self.asked = [False] * batch, [False] * batch

    def limits(self, rooms: Sequence[int]) -> list[int]:
        due = [step >= until for step, until in zip(self.steps, self.until, strict=True)]
        wanted = [size if now else 0 for size, now in zip(super().limits(rooms), due, strict=True)]
        self.asked = [size > 0 for size in wanted]
        return wanted

    def rest(self) -> int:
        left = [
            until - step
            for step, until, over in zip(self.steps, self.until, self.over, strict=True)
            if not over
        ]
        return max(min(left, default=0), 0)

    def rested(self, steps: int, seconds: float) -> None:
        self.steps = [step + steps for step in self.steps]

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        for index, tokens in enumerate(taken.tokens):
            self.over[index] = not tokens
            self.steps[index] += 1
            if self.asked[index] and tokens:
                self._count(index, len(tokens))
        self.asked = [False] * self.batch

    def _count(self, index: int, tokens: int) -> None:
        account = min(self.accounts[index] + tokens - self.record.least, MOST)
        if account < 0:
            self.until[index] = self.steps[index] + self.waits[index]
            self.waits[index] = min(2 * self.waits[index], LONGEST)
        elif account >= CREDIT:
            self.waits[index] = FIRST
        self.accounts[index] = max(account, 0.0)
