"""Several drafters at once: their drafts become one tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....ir.plan import MergedDraft
from ...feeding.draft import NO_DRAFT, Draft
from ..trie import Trie
from .base import DRAFTERS
from .combining import CombiningDrafter


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
