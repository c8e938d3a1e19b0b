"""Let a reward model read along, and choose each token by what becomes of the text with it.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (model="path")::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func reward(tokens: i64[B,T], positions: i64[B,T]) -> reward f32[B,T]
    decode {
      step = accompanied(function="step", beside="reward")
      verify = valued(alpha=1.0, guest="reward")
    }

The reward is the reward model's score as it is, see `RewardPass`, which also says what is refused.
Another model, aligned before, writes on after each candidate: it drafts (`draft_model`), drafts
begin with the model's own candidates (`draft_target_first`), and the tree says how many there are
and how far each is written on. Approximate: the text is the one that the reward prefers, and is
meant to be; it takes a step a token, and as many calls of the drafting model as the tree is deep.
Refuses a plan with another verifier, too, and drafts that begin otherwise.
"""

from __future__ import annotations

from ...policies import builds
from ...stepping.reward_pass import RewardPass
from . import Valued


@builds(Valued)
class VerifyValued(RewardPass):
    """See `RewardPass` and the record."""
