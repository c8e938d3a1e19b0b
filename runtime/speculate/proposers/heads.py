"""Parallel heads: one look at the hidden state predicts several places ahead.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads" (2024); Stern et al., "Blockwise Parallel Decoding" (2018).
"""

from __future__ import annotations

import numpy as np
import torch

from ....ir.plan import HeadsDraft
from ..level import Ids, Level, repeated
from .base import PROPOSERS
from .hidden import HiddenProposer, level_of, taken_at


@PROPOSERS.register(HeadsDraft)
class HeadsProposer(HiddenProposer):
    """Head d's candidates follow every node of depth d: heads do not see each other's tokens."""

    record: HeadsDraft

    def start(self, tokens: torch.Tensor, states: torch.Tensor, count: int) -> Level:
        inputs = {"tokens": tokens} if self.record.whole_path else {}
        self.outputs = self.run(self.record.function, hidden=states, **inputs)
        self.place = 0
        batch, nodes = states.shape[:2]
        self.roots: Ids = np.tile(np.arange(nodes), (batch, 1))
        return level_of(self.outputs, count, 0)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        self.place += 1
        level = level_of(self.outputs, count, self.place)
        if level.tokens.shape[1] == 1:
            return repeated(level, parents)
        self.roots = np.take_along_axis(self.roots, parents, 1)
        return taken_at(level, self.roots)
