"""Let a reward model read along, and keep drafts that it finds good, whoever would write them.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (model="path")::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func reward(tokens: i64[B,T], positions: i64[B,T]) -> reward f32[B,T]
    decode {
      step = accompanied(function="step", beside="reward")
      verify = rewarded(threshold=0.7, guest="reward")
    }

A smaller model writes a step of a thought; where the reward of the text with it reaches the
threshold, it stays, else the target writes one in its place (Liao et al., "Reward-Guided
Speculative Decoding for Efficient LLM Reasoning", 2025). The drafter and `length_stretch`, which
says where such steps end, are passes of their own.

The reward is the sigmoid of the reward model's score, see `RewardPass`, which also says what it
refuses. Approximate: the text is the draft's where that is good enough, and is meant to be. Refuses
a plan with another verifier, too.
"""

from __future__ import annotations

from typing import ClassVar

from ...ir.plan import Rewarded
from ..policies import builds
from .reward_pass import RewardPass


@builds(Rewarded)
class VerifyRewarded(RewardPass):
    """See `RewardPass` and the record."""

    bounded: ClassVar[bool] = True
