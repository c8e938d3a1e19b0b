"""Reads the chain that the step itself has made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....ir.plan import FusedDraft
from ...feeding.draft import Draft, VerifiedStep
from ...feeding.outputs import integers
from ...memo import Memo
from ..committed import CommittedRows
from ..proposers.cached import CachedProposer
from ..setting import Setting
from .base import DRAFTERS, ChainDrafter
from .grown import GrownDrafter


@DRAFTERS.register(FusedDraft)
class FusedDrafter(ChainDrafter):
    """The chain that follows the text if the argmax decides what the text is.

    Where it does not (sampling, penalties), `apart` makes the chain in a call of its own; nothing
    is drafted where only the step knows which of the draft's rows are whose: where caches lose
    rows, or hold shared ones apart. Where a length policy may give drafts up, plain steps leave
    rows of the draft's cache out: then `behind` makes them, and the first chain, before the next
    step that drafts. rested: whether rows are left out.
    """

    record: FusedDraft
    ready = False
    in_step = True
    rested = False

    def __init__(self, record: FusedDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.apart: GrownDrafter | None = None
        self.behind: GrownDrafter | None = None
        aligned = self.executable.program.plan.cache.aligned
        if not self.options.by_argmax and aligned:
            self.apart = self.follower = GrownDrafter(record.draft, setting)
            self.wants, self.reads = self.apart.wants, self.apart.reads
        elif self.options.by_argmax:
            self.wants, self.levels = ("drafted",), record.levels
            if setting.length is not None and setting.length.record.gives_up:
                self.behind = self.follower = GrownDrafter(record.draft, setting)
                self.reads = self.behind.reads

    @property
    def rests(self) -> tuple[str, ...]:
        return self.wants if self.behind is None else self.behind.wants

    @property
    def rows(self) -> CommittedRows:
        """The draft's rows of the text, where `behind` makes some."""
        assert self.behind is not None and isinstance(self.behind.proposer, CachedProposer)
        return self.behind.proposer.committed

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.chains: list[list[int]] = [[]] * len(prompts)
        self.rested = False

    def prepare(self, rooms: Sequence[int]) -> bool:
        if self.behind is None or not self.rested or max(rooms) < 1:
            return False
        self.chains = [list(draft.tokens) for draft in self.behind.propose(rooms)]
        self.rested = False
        return True

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        if self.apart is not None:
            return self.apart.propose(rooms)
        self.prepare(rooms)
        return super().propose(rooms)

    def bring_up(self, usual: int) -> bool:
        """`behind` makes what is missing in `prepare`, with the first chain."""
        return self.apart is not None and self.apart.bring_up(usual)

    def observe(self, taken: VerifiedStep) -> None:
        if self.apart is not None:
            self.apart.observe(taken)
            return
        if not self.wants:
            return
        if self.behind is not None and "drafted" not in taken.outputs:
            self.behind.observe(taken)
            self.chains = [[]] * len(self.chains)
            self.rested = True
            return
        rows = integers(taken.outputs, "drafted")
        for index, (row, tokens) in enumerate(zip(rows, taken.tokens, strict=True)):
            place = taken.columns[index] + len(taken.paths[index])
            # A prompt's last piece is verified like a chain, which it is not.
            self._told(index, tokens)
            self.chains[index] = row[1:] if tokens and row[0] == place else []

    def _told(self, index: int, tokens: Sequence[int]) -> None:
        """A step that drafts has made the rows of all of the text but its last token."""
        if self.behind is not None:
            self.rows.made(index, tokens)

    def keep(self, index: int, fed: int) -> Memo:
        """rows: i64, those that the step made and that hold the token after them for certain."""
        if self.follower is not None:
            return super().keep(index, fed)
        return {"rows": torch.tensor(fed - 1 if self.wants else 0)}

    def reach(self, memo: Memo, count: int) -> int:
        if self.follower is not None:
            return super().reach(memo, count)
        if not self.wants:
            return count
        return min(count - 1, int(memo["rows"])) if memo and count else 0

    def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
        self._told(index, new)
        self.chains[index] = list(row[1:])

    def chain(self, index: int, room: int) -> list[int]:
        return self.chains[index][:room]
