"""Drafters that are made of others: the first that has a draft, or all of them as one tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....ir.plan import DraftRecord, FirstDraft, MergedDraft
from ...feeding.draft import NO_DRAFT, Draft, UnverifiedStep, VerifiedStep
from ...memo import Memo
from ..setting import Setting
from ..trie import Trie
from .base import DRAFTERS, Drafter
from .grown import drafter_for


class CombiningDrafter(Drafter):
    """`parts`, the drafters of the record's `of`; all of them see every step."""

    record: DraftRecord

    def __init__(self, record: Any, setting: Setting) -> None:
        super().__init__(record, setting)
        self.parts = [drafter_for(part, setting) for part in record.parts]
        self.wants = tuple(dict.fromkeys(name for part in self.parts for name in part.wants))
        self.reads = any(part.reads for part in self.parts)

    @property
    def rests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part.rests))

    def prepare(self, rooms: Sequence[int]) -> bool:
        return any([part.prepare(rooms) for part in self.parts])

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        for part in self.parts:
            part.begin(prompts)

    def read(self, fed: UnverifiedStep) -> None:
        for part in self.parts:
            part.read(fed)

    def observe(self, taken: VerifiedStep) -> None:
        for part in self.parts:
            part.observe(taken)

    def bring_up(self, usual: int) -> bool:
        return any([part.bring_up(usual) for part in self.parts])

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


@DRAFTERS.register(FirstDraft)
class FirstDrafter(CombiningDrafter):
    """Asks the next drafter only for the sequences that still have no draft."""

    record: FirstDraft

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rooms)
        for part in self.parts:
            open_ = [0 if d.tokens else room for d, room in zip(drafts, rooms, strict=True)]
            if not any(open_):
                break
            for index, draft in enumerate(part.propose(open_)):
                if draft.fed:
                    drafts[index] = draft
        return drafts


@DRAFTERS.register(MergedDraft)
class MergedDrafter(CombiningDrafter):
    """The union of the drafts as a trie: a path that several of them have is there once.

    Better than the first draft that there is: a copied chain is often right for long and often
    wrong at once, and a tree beside it covers the second case. Probabilities that a drafter
    sampled from are dropped: the union is not sampled from any, and is verified as such.
    """

    record: MergedDraft

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        drafts = [part.propose(rooms) for part in self.parts]
        return [merged(given, self.record.nodes) for given in zip(*drafts, strict=True)]


def merged(drafts: Iterable[Draft], nodes: int | None) -> Draft:
    """One tree of at most `nodes` nodes; those of earlier drafts first.

    >>> tree = merged([Draft([1, 2]), Draft([3, 1, 4], None, (-1, -1, 1))], 4)
    >>> tree.tokens, tree.parents
    ([1, 2, 3, 4], (-1, 0, -1, 0))
    """
    given = [draft for draft in drafts if draft.fed]
    if not given:
        return NO_DRAFT
    if len(given) == 1:
        return given[0] if nodes is None else given[0].cut(nodes)
    trie = Trie()
    places = [trie.insert(draft) for draft in given]
    whole = _riding(trie.draft(), given, places)
    return whole if nodes is None else whole.cut(nodes)


def _riding(whole: Draft, drafts: Sequence[Draft], places: Sequence[Sequence[int]]) -> Draft:
    """The union with all riders; places: where each draft's nodes are in it."""
    riders: list[int] = []
    follows: list[int] = []
    for draft, nodes in zip(drafts, places, strict=True):
        behind = len(whole.tokens) + len(riders)
        new = [*nodes, *range(behind, behind + len(draft.riders)), -1]
        riders += draft.riders
        follows += [new[column] for column in draft.follows]
    return whole.riding(riders, follows) if riders else whole
