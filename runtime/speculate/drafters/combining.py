"""What drafters that are made of others have in common."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.plan import FirstDraft, MergedDraft
from ...feeding.draft import UnverifiedStep, VerifiedStep
from ...memo import Memo
from ..setting import Setting
from .base import Drafter
from .grown import drafter_for


class CombiningDrafter(Drafter):
    """`parts`, the drafters of the record's `of`; all of them see every step."""

    def __init__(self, record: FirstDraft | MergedDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.parts = [drafter_for(part, setting) for part in record.of]
        self.wants = tuple(dict.fromkeys(name for part in self.parts for name in part.wants))
        self.reads = any(part.reads for part in self.parts)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        for part in self.parts:
            part.begin(prompts)

    def read(self, fed: UnverifiedStep) -> None:
        for part in self.parts:
            part.read(fed)

    def observe(self, taken: VerifiedStep) -> None:
        for part in self.parts:
            part.observe(taken)

    def keep(self, index: int, fed: int) -> Memo:
        """What each part keeps, numbered."""
        memos = [part.keep(index, fed) for part in self.parts]
        return {f"{n}.{name}": t for n, memo in enumerate(memos) for name, t in memo.items()}

    def reach(self, memo: Memo, count: int) -> int:
        return min(part.reach(_own(memo, n), count) for n, part in enumerate(self.parts))

    def resume(self, index: int, memo: Memo, count: int) -> None:
        for number, part in enumerate(self.parts):
            part.resume(index, _own(memo, number), count)


def _own(memo: Memo, number: int) -> Memo:
    """What the part of that number kept."""
    start = f"{number}."
    return {n.removeprefix(start): t for n, t in memo.items() if n.startswith(start)}
