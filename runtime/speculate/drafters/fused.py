"""Reads the chain that the step itself has made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....ir.plan import FusedDraft
from ...feeding.draft import Draft, VerifiedStep
from ...feeding.outputs import integers
from ...memo import Memo
from ..setting import Setting
from .base import DRAFTERS, ChainDrafter
from .grown import GrownDrafter


@DRAFTERS.register(FusedDraft)
class FusedDrafter(ChainDrafter):
    """The chain that follows the text if the argmax decides what the text is.

    Where it does not (sampling, penalties), `apart` makes the chain in a call of its own; nothing
    is drafted where only the step knows which of the draft's rows are whose: where caches lose
    rows, or hold shared ones apart.
    """

    record: FusedDraft
    ready = False

    def __init__(self, record: FusedDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.apart: GrownDrafter | None = None
        aligned = self.executable.program.plan.cache.aligned
        if not self.options.by_argmax and aligned:
            self.apart = self.follower = GrownDrafter(record.draft, setting)
            self.wants, self.reads = self.apart.wants, self.apart.reads
        elif self.options.by_argmax:
            self.wants, self.levels = ("drafted",), record.levels

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.chains: list[list[int]] = [[]] * len(prompts)

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        if self.apart is not None:
            return self.apart.propose(rooms)
        return super().propose(rooms)

    def observe(self, taken: VerifiedStep) -> None:
        if self.apart is not None:
            self.apart.observe(taken)
            return
        if not self.wants:
            return
        rows = integers(taken.outputs, "drafted")
        for index, (row, tokens) in enumerate(zip(rows, taken.tokens, strict=True)):
            place = taken.columns[index] + len(taken.paths[index])
            # A prompt's last piece is verified like a chain, which it is not.
            self.chains[index] = row[1:] if tokens and row[0] == place else []

    def keep(self, index: int, fed: int) -> Memo:
        """rows: i64, those that the step made and that hold the token after them for certain."""
        if self.apart is not None:
            return super().keep(index, fed)
        return {"rows": torch.tensor(fed - 1 if self.wants else 0)}

    def reach(self, memo: Memo, count: int) -> int:
        if self.apart is not None:
            return super().reach(memo, count)
        if not self.wants:
            return count
        return min(count - 1, int(memo["rows"])) if memo and count else 0

    def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
        self.chains[index] = list(row[1:])

    def chain(self, index: int, room: int) -> list[int]:
        return self.chains[index][:room]
