"""A reward model decides on drafts as a whole.

Source: Liao et al., "Reward-Guided Speculative Decoding for Efficient LLM Reasoning" (RSD, 2025).
Of a draft y of the text z the reward r(y | z) is looked at, and y stays if that reaches a
threshold; else the target writes instead, as it would without.
"""

from __future__ import annotations

from abc import abstractmethod
from math import isnan
from typing import ClassVar

from ....ir import Program
from ....ir.plan import Rewarded
from ...asking.checks import bad_logits
from ...asking.options import GenerationOptions
from ...feeding.draft import NO_DRAFT
from ..sampling import StepToVerify
from .base import GREEDY, SAMPLING, VERIFIERS, Verdict, Verifier
from .greedy import GreedyVerifier
from .rejection import RejectionVerifier


class _Rewarding(Verifier):
    """Mixed into an ordinary verifier, before it."""

    record: Rewarded
    beyond: ClassVar[int] = 1  # no token of the target's follows a draft

    def __init__(
        self, record: Rewarded, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.fetch = (*self.fetch, record.guest)
        self.scorer.best_only = False  # drafts hold tokens that are not the target's best

    @abstractmethod
    def written(self, step: StepToVerify) -> list[Verdict]:
        """The ordinary verifier's verdicts: without drafts, what the target writes."""

    def verify(self, step: StepToVerify) -> list[Verdict]:
        verdicts = self.written(step._replace(drafts=[NO_DRAFT] * len(step.texts)))
        ruled_out = self._ruled_out(step)
        for index, (text, draft) in enumerate(zip(step.texts, step.drafts, strict=True)):
            if text.done or not draft.tokens or index in ruled_out:
                continue
            count = len(draft.tokens)
            reward = float(step.outputs[self.record.guest][index, count])
            if isnan(reward):
                raise bad_logits()
            if reward >= self.record.threshold:
                # The last token stands where the target's own stands else: its row comes next.
                verdicts[index] = Verdict(range(count - 1), list(draft.tokens))
        return verdicts

    def _ruled_out(self, step: StepToVerify) -> set[int]:
        """Sequences with a draft token that the call's own options rule out."""
        if not (self.scorer.records or any(text.processors for text in step.texts)):
            return set()
        self.scorer.rows(step)
        return {index for index, _ in self.scorer.dead}


@VERIFIERS.register(Rewarded, GREEDY)
class RewardedGreedy(_Rewarding, GreedyVerifier):
    """The draft, or the target's best token."""

    def written(self, step: StepToVerify) -> list[Verdict]:
        return GreedyVerifier.verify(self, step)


@VERIFIERS.register(Rewarded, SAMPLING)
class RewardedSampling(_Rewarding, RejectionVerifier):
    """The draft, or a token that is drawn from the target's distribution."""

    def written(self, step: StepToVerify) -> list[Verdict]:
        return RejectionVerifier.verify(self, step)
