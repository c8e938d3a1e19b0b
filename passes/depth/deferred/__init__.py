"""Leave early where the first layers are sure; the rows that are lacking are made later.

Source: Bae et al., "Fast and Robust Early-Exiting Framework for Autoregressive Language Models with
Synchronized Parallel Decoding" (FREE, 2023); the falling threshold: Schuster et al., "Confident
Adaptive Language Modeling" (CALM, 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeAlias

from ....ir.plan import ThresholdDepth, policy
from ....ir.plan.bounds import Context, Levels, Nodes, Share
from ....runtime.asking.text import Text
from ....runtime.depth.base import DEPTHS, DepthPolicy, StepFeed
from ....runtime.depth.sure import all_sure, margins, may_leave
from ....runtime.feeding.feed import Feeder
from ....runtime.feeding.outputs import Outputs
from ....runtime.memo import learnt
from .alignment import threshold


@policy
@dataclass(frozen=True)
class DeferredDepth(ThresholdDepth):
    """Leave after the first layers where they are sure, and make up for it later (FREE).

    A token whose likeliest successor, by the target's own head on the state after `exit` layers, is
    more probable than the second by more than the threshold is continued from there. The rows that
    it lacks in the deeper layers' caches are made with the next token that goes deep, in one call
    (synchronised parallel decoding; Bae et al. 2023). A batch leaves together, or goes on together.
    pending: tokens that may lack rows before all go deep. posterior: 0, or the threshold is learnt:
    the first `compared` predictions of the first layers are compared with the whole model's, and
    before each text the threshold becomes the least of ten confidences from 0.3 to 0.9 from which
    on they agree with this posterior probability, by a Beta distribution for each of the two kinds.
    It is kept as long as the model is. The rest: see `ThresholdDepth`.
    """

    exit: Levels = 3
    pending: Nodes = 7
    posterior: Share = 0.0
    compared: Context = 1024
    kind: ClassVar[str] = "deferred"

    def fixed(self, threshold: float, tokens: int) -> Self:
        """See `ThresholdDepth.fixed`: nothing is learnt."""
        return replace(super().fixed(threshold, tokens), posterior=0.0)


Said: TypeAlias = tuple[float, int]
"""How sure the first layers were of a prediction, and the token."""


class Learnt:
    """What a model's texts have told of the threshold. record: with the one that holds now."""

    def __init__(self, record: DeferredDepth) -> None:
        self.record, self.start = record, record.threshold
        self.sure: list[float] = []
        self.shared: list[bool] = []

    @property
    def learns(self) -> bool:
        """Whether more is to be learnt."""
        return self.record.posterior > 0 and len(self.sure) < self.record.compared

    def compare(self, asked: Sequence[Sequence[Said]], deep: Sequence[Sequence[int]]) -> None:
        """Take in predictions, and the whole model's for the same tokens, by sequence."""
        for said, tokens in zip(asked, deep, strict=True):
            for (sure, best), token in zip(said, tokens, strict=False):
                self.sure.append(sure)
                self.shared.append(best == token)

    def fit(self) -> None:
        """Let the threshold be what the predictions so far ask for."""
        found = threshold(self.sure, self.shared, self.record.posterior, self.start)
        self.record = replace(self.record, threshold=found)


@DEPTHS.register(DeferredDepth)
class DeferredPolicy(DepthPolicy):
    """lacking: by sequence, the rows before its next one that the deeper layers have not made."""

    record: DeferredDepth

    def begin(self, feeder: Feeder, texts: Sequence[Text]) -> None:
        super().begin(feeder, texts)
        self.lacking = [0] * len(texts)
        self.asked: list[list[Said]] = [[] for _ in texts]
        kept = learnt(self.executable, DeferredPolicy)
        self.learnt: Learnt = kept.setdefault(self.record, Learnt(self.record))
        # As published: a text is decoded with one threshold, which the next one's may differ from.
        self.learnt.fit()
        count = self.executable.program.plan.step.cuts.index(self.record.exit) + 1
        self.shallow, self.deep = tuple(self.parts[:count]), tuple(self.parts[count:])
        self.before = sum(self.sizes[:count])

    def feed(self, step: StepFeed) -> Outputs:
        self.ran = self.total
        live = [index for index, text in enumerate(self.texts) if not text.done]
        drafts = any(len(row) > 1 for row in step.rows)  # are verified by all layers
        if drafts or not may_leave(self.record, self.texts, live):
            self._make_up()
            return super().feed(step)
        if max(self.lacking) >= self.record.pending:
            self.feeder.run_parts(self.shallow, step, ())
        else:
            wanted = tuple(dict.fromkeys(("logits", *step.fetch)))
            outputs = self.feeder.run_parts((*self.shallow, self.head), step, wanted)
            sure = margins(outputs, live)
            if self.learns and self.learnt.learns:
                best = outputs["logits"][live, 0].argmax(-1).tolist()
                for index, said in zip(live, zip(sure, best, strict=True), strict=True):
                    self.asked[index].append(said)
            if all_sure(self.learnt.record, self.texts, live, sure):
                self.ran = self.before
                for index, text in enumerate(self.texts):
                    self.lacking[index] += not text.done
                return outputs
        if not any(self.lacking) and not any(self.asked):
            return self.feeder.run_parts((*self.deep, self.head), step, step.fetch)
        self._deepen(step, 1)
        return self.feeder.run_parts((self.head,), step, step.fetch)

    def _make_up(self) -> None:
        """Make all rows that are lacking."""
        if any(self.lacking):
            past = [0 if text.done else text.rows for text in self.texts]
            starts = [0 if text.done else text.position for text in self.texts]
            self._deepen(StepFeed([[] for _ in past], past, starts, ()), 0)

    def _deepen(self, step: StepFeed, more: int) -> None:
        """Run the deeper layers on what is lacking and `more` tokens behind it."""
        lacking = [
            0 if text.done else count for text, count in zip(self.texts, self.lacking, strict=True)
        ]
        past = [place - count for place, count in zip(step.past, lacking, strict=True)]
        starts = [place - count for place, count in zip(step.starts, lacking, strict=True)]
        # Deeper layers take up states and are fed no tokens: these only say how many there are.
        rows = [[0] * (count + more) for count in lacking]
        step = StepFeed(rows, past, starts, ())
        self.feeder.run_parts(self.deep, step, ())
        if any(self.asked):
            outputs = self.feeder.run_parts((self.head,), step, ("logits",))
            self.learnt.compare(self.asked, outputs["logits"].argmax(-1).tolist())
            self.asked = [[] for _ in lacking]
        self.lacking = [0] * len(lacking)
