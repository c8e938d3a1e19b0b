"""A step of any kind: drafts of any shape, any verifier, any options."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.plan.contract import Contract
from ..asking.text import Text
from ..feeding.draft import NO_DRAFT, Draft, UnverifiedStep, VerifiedStep
from ..feeding.feed import Feeder, StepFeed
from ..feeding.outputs import Outputs
from .base import Decoding, Round


class GeneralRound(Round):
    """draft -> step -> verify -> commit, once.

    late: seconds in which the drafter was brought up to the text, in this step.
    """

    late = 0.0

    @classmethod
    def fits(cls, decoding: Decoding) -> bool:
        return True

    def wants(self) -> int | None:
        return 1

    def run(self, most: int | None) -> int:
        decoding = self.decoding
        live = sum(not text.done for text in decoding.own)
        before, self.late = decoding.clock(), 0.0
        drafts = decoding.paired(self.propose())
        between = decoding.clock()
        made = sum(text.generated for text in decoding.own)
        step = self.step(drafts)
        made = sum(text.generated for text in decoding.own) - made
        decoding.stats.skipped_layers += (decoding.depth.total - decoding.depth.ran) * made
        drafting = between - before - self.late
        decoding.length.observe(step, drafting, decoding.clock() - between)
        decoding.stats.count(1, live)
        return 1

    def propose(self) -> Sequence[Draft]:
        """A draft for each sequence, as far as the length policy and its room allow."""
        decoding, limit = self.decoding, self.decoding.room()
        beyond = decoding.verifier.beyond
        rooms = [0 if text.done else text.room + beyond for text in decoding.texts]
        if limit is not None:
            rooms = [min(room, limit - 1) for room in rooms]
        if forced := self.forced(rooms):
            return forced
        counts = decoding.length.limits(rooms)
        if not any(counts):
            return decoding.no_drafts
        begun = decoding.clock()
        if decoding.drafter.bring_up(decoding.length.most + 1):
            self.late = decoding.clock() - begun
            decoding.length.prepared(self.late)
        drafts = decoding.drafter.propose(list(map(min, rooms, counts)))
        return [
            draft.cut(count) if len(draft.tokens) > count else draft
            for draft, count in zip(drafts, counts, strict=True)
        ]

    def forced(self, rooms: Sequence[int]) -> Sequence[Draft]:
        """What grammars force each text to go on with; () if that is nothing. The drafter is not
        asked then: it learns of such steps as of any others. Where a draft that is rejected cannot
        be taken back, or has to be the drafter's own, there is none."""
        decoding, plan = self.decoding, self.decoding.program.plan
        free = plan.verify.contract is Contract.LOSSLESS or plan.verify.stays
        if not decoding.grammars or not free or decoding.program.recurrent:
            return ()
        drafts = [
            Draft(text.grammar.forced(text.known)[:room])
            if text.grammar is not None and room > 0
            else NO_DRAFT
            for text, room in zip(decoding.texts, rooms, strict=True)
        ]
        return drafts if any(draft.tokens for draft in drafts) else ()

    def step(self, drafts: Sequence[Draft]) -> VerifiedStep:
        """Feed last tokens and drafts, and verify. Drafts wider than any step are cut."""
        decoding, texts = self.decoding, self.decoding.texts
        rows = [0 if text.done else text.rows for text in texts]
        if decoding.resting is not decoding.feeder and not any(draft.tokens for draft in drafts):
            drafts, feed = step_feed(decoding.resting, texts, drafts, rows, decoding.rests)
            return self.take(drafts, feed.rows, decoding.resting.run(feed))
        decoding.drafter.prepare([0 if text.done else text.room for text in texts])
        drafts, feed = step_feed(decoding.feeder, texts, drafts, rows, decoding.fetch)
        return self.take(drafts, feed.rows, decoding.depth.feed(feed))

    def take(
        self, drafts: Sequence[Draft], fed: Sequence[Sequence[int]], outputs: Outputs
    ) -> VerifiedStep:
        """Verify a step that ran. fed: its rows."""
        decoding, texts = self.decoding, self.decoding.texts
        if decoding.read is not None:
            before = [0 if text.done else text.fed for text in texts]
            decoding.read(UnverifiedStep(fed, before, outputs))
        return decoding.verify(outputs, drafts, [0] * len(texts))


def step_feed(
    feeder: Feeder,
    texts: Sequence[Text],
    drafts: Sequence[Draft],
    past: Sequence[int],
    fetch: tuple[str, ...],
) -> tuple[Sequence[Draft], StepFeed]:
    """What a step is fed: last tokens and drafts, which are cut if they are wider than any step;
    texts that are done are fed filler. past: rows of each text before the step."""
    starts = [0 if text.done else text.position for text in texts]
    need = 1 + max(len(draft.fed) for draft in drafts)
    width = feeder.width(need, max(past))
    if width < need:
        drafts = [draft.fitting(width - 1) for draft in drafts]
    rows = [
        [] if text.done else [text.tokens[-1], *draft.fed]
        for text, draft in zip(texts, drafts, strict=True)
    ]
    trees = drafts if any(draft.branches for draft in drafts) else None
    mixes = [text.mixture for text in texts] if any(text.mixture for text in texts) else ()
    return drafts, StepFeed(rows, past, starts, fetch, width, trees, mixes)
