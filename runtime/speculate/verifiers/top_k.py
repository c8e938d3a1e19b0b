"""Top-k acceptance: a draft token passes if the target ranks it high, whatever it ranks first."""

from __future__ import annotations

import torch

from ....ir.plan import TopKAccept
from ..sampling import Array
from .base import GREEDY, SAMPLING, VERIFIERS
from .relaxed import RelaxedVerifier


@VERIFIERS.register(TopKAccept, GREEDY)
@VERIFIERS.register(TopKAccept, SAMPLING)
class TopKVerifier(RelaxedVerifier):
    """A token passes if it is among the `count` likeliest, or as likely as the last of them.

    Source: Stern et al., "Blockwise Parallel Decoding for Deep Autoregressive Models" (2018),
    section 5.1.
    """

    record: TopKAccept

    def bounds(self, probs: Array) -> Array:
        count = min(self.record.count, probs.shape[-1])
        found: Array = torch.from_numpy(probs).topk(count).values[:, -1].numpy()
        return found
