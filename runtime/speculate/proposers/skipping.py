"""The target without some of its segments drafts; which ones, a subclass says.

Drafted tokens run through the chosen segments over the target's own caches; verification runs them
through all, and so writes their rows anew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ....ir.plan.skipping import SkippingDraft
from ...feeding.draft import VerifiedStep
from ...feeding.feed import StepFeed
from ..level import Ids, Level
from ..setting import Setting
from .base import LayersProposer
from .hidden import best_of

FETCH = ("logits",)


class SkippingProposer(LayersProposer):
    """kept: places of the segments that draft. count: how many are left out. since: steps since."""

    record: SkippingDraft

    def __init__(self, record: SkippingDraft, setting: Setting, period: int) -> None:
        super().__init__(record, setting)
        program = self.executable.program
        *self.parts, self.head = program.plan.step.parts
        self.rows = sorted({name for part in self.parts for name in program.states_of(part)})
        self.inner = program.plan.step.inner
        self.count = record.count(program.plan.step)
        self.period = self.since = period
        self.kept = self.without(evenly(self.inner, self.count))

    def without(self, skipped: Sequence[int]) -> list[int]:
        """The places of all other segments."""
        return [place for place in range(len(self.parts)) if place not in skipped]

    @abstractmethod
    def chosen(self) -> list[int]:
        """The segments to draft with now, by their places."""

    def observe(self, taken: VerifiedStep) -> None:
        self.since += 1

    def root(self, count: int) -> Level:
        if self.since >= self.period:
            self.kept, self.since = self.chosen(), 0
        self.below = 0
        return self._level([[] if t.done else [t.tokens[-1]] for t in self.texts], count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        self.below += 1
        rows = [[max(token, 0)] for (token,) in tokens.tolist()]
        rows = [[] if t.done else row for t, row in zip(self.texts, rows, strict=True)]
        return self._level(rows, count)

    def _level(self, rows: Sequence[Sequence[int]], count: int) -> Level:
        step = StepFeed(rows, *self.ends(), FETCH)
        outputs = self.feeder.run_parts(self.drafting, step, FETCH)
        # A copy: outputs live until the next run.
        return best_of(outputs["logits"][:, :1].float().cpu().clone(), count)

    @property
    def drafting(self) -> tuple[str, ...]:
        """The functions that draft."""
        return (*(self.parts[place] for place in self.kept), self.head)

    @contextmanager
    def borrowed(self, counts: Mapping[int, int]) -> Iterator[list[int]]:
        """Let the last `counts[b]` rows of some sequences be overwritten, then restore them. Where
        they begin in each; 0 in the others."""
        texts, executable = self.texts, self.executable
        past = [text.rows - counts[b] if b in counts else 0 for b, text in enumerate(texts)]
        before = {
            b: executable.read_rows(self.rows, b, past[b], past[b] + n) for b, n in counts.items()
        }
        yield past
        for b, rows in before.items():
            executable.write_rows(b, past[b], rows)


def evenly(places: Sequence[int], count: int) -> list[int]:
    """So many of the places, with alike distances.

    >>> evenly(range(2, 14), 4)
    [3, 6, 9, 12]
    """
    return [places[int((at + 0.5) * len(places) / count)] for at in range(count)]
