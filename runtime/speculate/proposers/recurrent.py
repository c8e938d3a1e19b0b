"""Heads in sequence: each level's prediction depends on the tokens of the path before it.

Source: Ankner et al., "Hydra" (2024); Cheng et al., "Recurrent Drafter" (2024); Wertheimer et al.,
"Accelerating Production LLMs with Combined Token/Embedding Speculators" (2024).

The first state is the target's, or what a layer with a cache makes of the target's up to there
(Hydra++'s prefix attention).
"""

from __future__ import annotations

import torch

from ....ir.plan import RecurrentDraft
from ...feeding.gather import gathered
from ..committed import CommittedRows
from ..level import Ids, Level
from ..setting import Setting
from .base import PROPOSERS
from .hidden import HiddenProposer, level_of


@PROPOSERS.register(RecurrentDraft)
class RecurrentProposer(HiddenProposer):
    """Carries a state from each node to its children."""

    record: RecurrentDraft

    def __init__(self, record: RecurrentDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.committed: CommittedRows | None = None
        if record.entry is not None:
            context = self.executable.program.info.context
            self.committed = CommittedRows(self.executable, record.entry, "hidden", limit=context)
        self.follower, self.reads = self.committed, self.committed is not None

    def root(self, count: int) -> Level:
        if self.committed is None:
            return super().root(count)
        level = self.start(self.last.get()[0], self.committed.catch_up()["hidden"], count)
        level.tokens[self.committed.lacking] = -1
        return level

    def start(self, tokens: torch.Tensor, states: torch.Tensor, count: int) -> Level:
        self.place = 0
        return self._next(tokens, states, count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        self.place += 1
        fed = torch.from_numpy(tokens.clip(min=0))
        return self._next(fed, gathered(self.carried, parents), count)

    def _next(self, tokens: torch.Tensor, state: torch.Tensor, count: int) -> Level:
        functions = self.record.functions
        function = functions[min(self.place, len(functions) - 1)]
        outputs = self.run(function, tokens=tokens, state=state)
        self.carried = outputs["state"].clone()
        return level_of(outputs, count)
