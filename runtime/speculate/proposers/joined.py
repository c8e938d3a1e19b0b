"""Parallel heads below a drafted path, which see all of its tokens and states.

Source: Li et al., "Gumiho: A Hybrid Architecture to Prioritize Early Tokens in Speculative
Decoding" (2025).
"""

from __future__ import annotations

import torch

from ....ir.plan import JoinedHeadsDraft
from .base import PROPOSERS, Level
from .heads import HeadsProposer


@PROPOSERS.register(JoinedHeadsDraft)
class JoinedHeadsProposer(HeadsProposer):
    """Head d's candidates follow every node d levels below the one that the heads started from."""

    record: JoinedHeadsDraft

    def start(self, tokens: torch.Tensor, states: torch.Tensor, count: int) -> Level:
        """Run the heads below nodes whose last tokens are i64[B,M,S], chosen from [B,M,S,H]."""
        return self.begun(count, tokens=tokens, hidden=states)
