"""The target drafts for itself, where another model reads what it writes.

A drafted token costs what a token costs without drafts, and is what the target would write: nothing
is gained but that the other model reads several tokens at once. What the target made of them is
kept, so that the step has none of them run through it twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DecodePlan, DraftRecord, record
from ....ir.plan.bounds import Levels
from ....runtime.feeding.feed import StepFeed
from ....runtime.speculate.level import Ids, Level
from ....runtime.speculate.proposers.base import PROPOSERS, LayersProposer
from ....runtime.speculate.proposers.hidden import best_of

FETCH = ("logits",)


@record
@dataclass(frozen=True)
class OwnDraft(DraftRecord):
    """The target writes, and another model then reads so many tokens at once (`Accompanied`).

    levels: tokens drafted at most; the step's own is one more. Lossless: every token is what the
    target chooses. For steps that another model accompanies, such as those of `verify_suspicion`.
    """

    levels: Levels = 3
    kind: ClassVar[str] = "own"
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    grows: ClassVar[bool] = True
    narrow: ClassVar[bool] = True
    always: ClassVar[bool] = True

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: steps that are the target's alone."""
        if not plan.step.along:
            yield (
                f"draft={self.brief} lets another model read several tokens at once, and none "
                f"reads along (step={plan.step.brief}): list it after a pass that brings one, such "
                f"as verify_suspicion"
            )


@PROPOSERS.register(OwnDraft)
class OwnProposer(LayersProposer):
    """chains: each text's last token and the draft behind it."""

    record: OwnDraft

    def root(self, count: int) -> Level:
        self.chains = [[] if text.done else [text.tokens[-1]] for text in self.texts]
        self.past, self.starts = self.ends()
        return self._level(count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        for chain, (token,) in zip(self.chains, tokens.tolist(), strict=True):
            if chain and token >= 0:
                chain.append(token)
        return self._level(count)

    def _level(self, count: int) -> Level:
        step = StepFeed(self.chains, self.past, self.starts, FETCH)
        logits = self.feeder.lead(1, step)["logits"]
        # A copy: outputs live until the next run.
        return best_of(logits[:, :1].float().cpu().clone(), count)
