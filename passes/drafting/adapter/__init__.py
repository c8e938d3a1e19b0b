"""The target's own first layers draft through a layer of their own that sees the text so far.

Source: Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting" (2024).
The layer's rows of committed text are made once it is committed, from the states that steps return
(see `CommittedRows`); rows of drafted tokens are forgotten after each draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....ir.plan import record
from ....ir.plan.bounds import Filled
from ....runtime.speculate.committed import CommittedRows
from ....runtime.speculate.level import Ids, Level
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.hidden import level_of
from ....runtime.speculate.proposers.shallow import CachedLeader, LeadingProposer
from ....runtime.speculate.setting import Setting
from ..exit import ExitDraft


@record
@dataclass(frozen=True)
class AdaptedExitDraft(ExitDraft):
    """As `ExitDraft`, through a layer with a cache of its own on that state (Kangaroo).

    function: takes the state of each token of the text as ``hidden``, with ``positions`` [B,T],
    ``past``, ``select`` [B,S] and its states; returns what an exit head returns, of chosen tokens.
    """

    function: Filled[str] = "adapter"
    kind: ClassVar[str] = "adapted_exit"

    @property
    def cached(self) -> tuple[str, ...]:
        return (self.function,)


@PROPOSERS.register(AdaptedExitDraft)
class AdaptedExitProposer(LeadingProposer):
    """Puts the layer's rows behind those of the text."""

    record: AdaptedExitDraft
    leads = CachedLeader
    reads = True
    committed: CommittedRows

    def __init__(self, record: AdaptedExitDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.wants = (record.output,)
        limit = self.executable.program.info.context
        self.committed = self.follower = CommittedRows(
            self.executable, record.function, record.output, limit=limit
        )

    def level(self, count: int) -> Level:
        committed = self.committed
        if not self.below:
            level = level_of(committed.look_ahead(self.state), count)
            level.tokens[committed.lacking] = -1
            return level
        rows = [rows + self.below for rows in committed.rows]
        past = [committed.place(index, row, 1) for index, row in enumerate(rows)]
        place: Ids = np.array(past, dtype=np.int64)[:, None]
        nothing = np.zeros_like(place)
        outputs = committed.cache.run(nothing, place, past, nothing, self.state)
        level = level_of(outputs, count)
        level.tokens[~np.array(committed.alive)] = -1
        return level
