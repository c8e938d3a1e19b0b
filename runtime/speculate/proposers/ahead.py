"""A drafter with a cache whose last call predicts two levels.

Source: Huang et al., "Jakiro: Boosting Speculative Decoding with Decoupled Multi-Head via MoE"
(2025).
"""

from __future__ import annotations

import torch

from ....ir.plan import AheadDraft
from .base import PROPOSERS
from .continued import ContinuedProposer


@PROPOSERS.register(AheadDraft)
class AheadProposer(ContinuedProposer):
    """What follows a node of the last level is what its parent's call said two places on, so
    siblings share it."""

    record: AheadDraft

    @property
    def states(self) -> torch.Tensor:
        """See `ContinuedProposer.states`."""
        return self.first.made["ahead"]
