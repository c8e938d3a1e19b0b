"""Parallel heads: one look at the hidden state predicts several places ahead.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads" (2024); Stern et al., "Blockwise Parallel Decoding" (2018).
"""

from __future__ import annotations

from ...ir.executable import Executable
from ...ir.plan import HeadsDraft
from ..options import GenerationOptions
from .base import PROPOSERS, Ids, Level
from .hidden import HiddenProposer, level_of, repeated


@PROPOSERS.register(HeadsDraft)
class HeadsProposer(HiddenProposer):
    """Head d's candidates follow every node of depth d: heads do not see each other's tokens."""

    record: HeadsDraft

    def __init__(
        self, record: HeadsDraft, executable: Executable, options: GenerationOptions
    ) -> None:
        super().__init__(record, executable, options)
        self.depth = record.levels

    def root(self, count: int) -> Level:
        """Run the heads; the first one's candidates."""
        self.outputs = self.run(self.record.function, hidden=self.state)
        self.place = 0
        return level_of(self.outputs, count, 0)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """The next head's candidates, the same for all nodes."""
        self.place += 1
        return repeated(level_of(self.outputs, count, self.place), parents)
