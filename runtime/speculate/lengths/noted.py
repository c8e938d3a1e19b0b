"""Notes of which tokens drafts brought."""

from __future__ import annotations

from ....ir.execution.executable import Executable
from ....ir.plan import NotedLength
from ...feeding.draft import VerifiedStep
from ...memo import learnt
from .base import LENGTHS, DelegatingPolicy

LATEST = "latest"


@LENGTHS.register(NotedLength)
class NotedPolicy(DelegatingPolicy):
    """Another policy, whose steps are kept account of.

    made: tokens of each sequence so far, the prompt's first successor among them; foreseen: by
    sequence, which of these were drafted and accepted, counted from 0. Both are those of the
    executable's latest generation, see `foreseen_by`.
    """

    record: NotedLength

    def __init__(self, record: NotedLength, executable: Executable, batch: int) -> None:
        super().__init__(LENGTHS.find(record.of)(record.of, executable, batch))
        self.record = record
        self.made = [1] * batch
        self.foreseen: list[list[int]] = [[] for _ in range(batch)]
        self._latest()

    def _latest(self) -> None:
        # Again with each step: a prefix that prompts share is a generation before their own.
        learnt(self.executable, NotedPolicy)[LATEST] = self.foreseen

    def rested(self, steps: int, seconds: float) -> None:
        self._latest()
        self.made = [count + steps for count in self.made]
        super().rested(steps, seconds)

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        self._latest()
        each = zip(self.foreseen, self.made, taken.paths, strict=True)
        for foreseen, made, path in each:
            foreseen += range(made, made + len(path))
        new = zip(self.made, taken.tokens, strict=True)
        self.made = [made + len(tokens) for made, tokens in new]
        super().observe(taken, drafting, step)


def foreseen_by(executable: Executable) -> list[list[int]]:
    """By sequence of the latest generation whose plan takes notes, the new tokens that were drafted
    and accepted, counted from 0; once: nothing is left for a second call."""
    found: list[list[int]] = learnt(executable, NotedPolicy).pop(LATEST, [])
    return found
