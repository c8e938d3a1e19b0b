"""A reward model decides on drafts as a whole.

Source: Liao et al., "Reward-Guided Speculative Decoding for Efficient LLM Reasoning" (RSD, 2025).
Of a draft y of the text z the reward r(y | z) is looked at, and y stays if that reaches a
threshold; else the target writes instead, as it would without.
"""

from __future__ import annotations

from math import isnan

from ....ir import Program
from ....ir.plan import Rewarded
from ...asking.checks import bad_logits
from ...asking.options import GenerationOptions
from ...feeding.draft import NO_DRAFT
from ..sampling import StepToVerify
from .base import GREEDY, SAMPLING, VERIFIERS, Verdict
from .greedy import GreedyVerifier
from .keeping import Keeping
from .rejection import RejectionVerifier


class _Rewarding(Keeping):
    """Keeps drafts with rewards that are high enough; else the target writes."""

    record: Rewarded

    def __init__(
        self, record: Rewarded, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.fetch = (*self.fetch, record.guest)

    def keeps(self, step: StepToVerify, index: int) -> bool:
        reward = float(step.outputs[self.record.guest][index, len(step.drafts[index].tokens)])
        if isnan(reward):
            raise bad_logits()
        return reward >= self.record.threshold


def _alone(step: StepToVerify) -> StepToVerify:
    """The step as if nothing had been drafted."""
    return step._replace(drafts=[NO_DRAFT] * len(step.texts))


@VERIFIERS.register(Rewarded, GREEDY)
class RewardedGreedy(_Rewarding, GreedyVerifier):
    """The draft, or the target's best token."""

    def ordinary(self, step: StepToVerify) -> list[Verdict]:
        return GreedyVerifier.verify(self, _alone(step))


@VERIFIERS.register(Rewarded, SAMPLING)
class RewardedSampling(_Rewarding, RejectionVerifier):
    """The draft, or a token that is drawn from the target's distribution."""

    def ordinary(self, step: StepToVerify) -> list[Verdict]:
        return RejectionVerifier.verify(self, _alone(step))
