"""Heads in sequence: each level's prediction depends on the tokens of the path before it.

Source: Ankner et al., "Hydra" (2024); Cheng et al., "Recurrent Drafter" (2024); Wertheimer et al.,
"Accelerating Production LLMs with Combined Token/Embedding Speculators" (2024).
"""

from __future__ import annotations

import torch

from ...ir.executable import Executable
from ...ir.plan import RecurrentDraft
from ..options import GenerationOptions
from .base import PROPOSERS, Ids, Level
from .hidden import HiddenProposer, gathered, level_of


@PROPOSERS.register(RecurrentDraft)
class RecurrentProposer(HiddenProposer):
    """Carries a state from each node to its children."""

    record: RecurrentDraft

    def __init__(
        self, record: RecurrentDraft, executable: Executable, options: GenerationOptions
    ) -> None:
        super().__init__(record, executable, options)
        self.depth = record.levels

    def start(self, tokens: torch.Tensor, states: torch.Tensor, count: int) -> Level:
        """What the first function says."""
        self.place = 0
        return self._next(tokens, states, count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """What may follow each node, from its own token and its parent's state."""
        self.place += 1
        fed = torch.from_numpy(tokens.clip(min=0))
        return self._next(fed, gathered(self.carried, parents), count)

    def _next(self, tokens: torch.Tensor, state: torch.Tensor, count: int) -> Level:
        functions = self.record.functions
        function = functions[min(self.place, len(functions) - 1)]
        outputs = self.run(function, tokens=tokens, state=state)
        self.carried = outputs["state"].clone()
        return level_of(outputs, count)
