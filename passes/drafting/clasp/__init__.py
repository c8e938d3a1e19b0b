"""The layers that change the last token's states least are left out of the next drafts.

Source: Chen et al., "CLaSp: In-Context Layer Skip for Self-Speculative Decoding" (2025).

Dynamic program on a committed token: g(i, j), for j of the first i segments left out, is whichever
of f_i(g(i - 1, j)) and g(i - 1, j - 1) is nearer h(i). The candidates for all j are columns of one
call of a segment; they see the text before the token and themselves. Column 0 leaves nothing out:
it is h(i).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ....ir.plan import SkippingDraft, policy
from ....ir.plan.bounds import Levels
from ....runtime.feeding.draft import NO_DRAFT
from ....runtime.feeding.feed import StepFeed
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.skipping import SkippingProposer
from ....runtime.speculate.setting import Setting


@policy
@dataclass(frozen=True)
class LikestSkippingDraft(SkippingDraft):
    """The target's layers without those that change its states least (CLaSp, Chen et al. 2025).

    Before a draft, but every `period` steps only, the segments to leave out follow from the last
    token that went through all of them: of all ways to leave j of the first i out, the one is kept
    whose state is most like the whole one's, by cosine, and goes on through segment i + 1, or past
    it (a dynamic program). share: of the segments that hold nothing of the first nor the last
    layer, how many are left out. levels: tokens drafted at most. A batch leaves out the same ones.
    """

    period: Levels = 1
    kind: ClassVar[str] = "likest_skipping"
    requires: ClassVar[frozenset[str]] = frozenset({"segments", "trees"})


@PROPOSERS.register(LikestSkippingDraft)
class LikestSkippingProposer(SkippingProposer):
    """stream: the state by which segments hand on what they make."""

    record: LikestSkippingDraft

    def __init__(self, record: LikestSkippingDraft, setting: Setting) -> None:
        super().__init__(record, setting, record.period)
        states = self.executable.program.states.values()
        (self.stream,) = [state.name for state in states if state.part == "hidden"]

    def chosen(self) -> list[int]:
        """By the dynamic program on each text's last token that has rows."""
        counts = {b: 1 for b, text in enumerate(self.texts) if not text.done and text.rows}
        if not counts:
            return self.kept
        with self.borrowed(counts) as past:
            best: list[Kept] = [(torch.empty(0), ())]
            for place in range(len(self.parts)):
                made = self._through(place, past, list(counts), [state for state, _ in best])
                skips = place in self.inner
                best = nearest(best, made, place, skips=skips)[: self.count + 1]
        return list(best[-1][1])

    def _through(
        self, place: int, past: Sequence[int], live: Sequence[int], states: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What a segment makes of candidates f[live,H]; the first makes its own."""
        texts, executable = self.texts, self.executable
        for index, b in enumerate(live if place else ()):
            rows = torch.stack([state[index] for state in states])
            executable.write_rows(b, past[b], {self.stream: rows[None]})
        tokens = [[text.tokens[-2]] if b in live else [] for b, text in enumerate(texts)]
        starts = [text.position - 1 if b in live else 0 for b, text in enumerate(texts)]
        width = self.feeder.width(self.count + 1, max(past))
        step = StepFeed(tokens, past, starts, (), width, [NO_DRAFT] * len(texts))
        self.feeder.run_parts((self.parts[place],), step, ())
        made = [
            executable.read_rows([self.stream], b, past[b], past[b] + len(states))[self.stream]
            for b in live
        ]
        return list(torch.stack([rows[0] for rows in made]).unbind(1))


Kept = tuple[torch.Tensor, tuple[int, ...]]
"""States f[N,H], and the segments that made them."""


def nearest(
    best: Sequence[Kept], made: Sequence[torch.Tensor], place: int, *, skips: bool
) -> list[Kept]:
    """For each number of segments left out, what is most like the whole text's state behind segment
    `place`; best: before it, made: what it makes of those. skips: whether it may be left out."""
    found = []
    for count in range(len(best) + skips):
        options = [best[count - 1]] if skips and count else []
        if count < len(best):
            options.append((made[count], (*best[count][1], place)))
        found.append(max(options, key=lambda option: _likeness(option[0], made[0])))
    return found


def _likeness(states: torch.Tensor, whole: torch.Tensor) -> float:
    """The mean cosine over texts."""
    return float(torch.cosine_similarity(states.float(), whole.float(), dim=-1).mean())
