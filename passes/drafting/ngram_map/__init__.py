"""Draft what followed the text's last n tokens, where mostly the same m tokens followed them.

Source: llama.cpp, common/ngram-map (ngram-map-k and ngram-map-k4v, 2026).

Each n-gram of the text is a key. Its values are the m-grams that followed it, the first `values`
different ones, each with the number of times that it did, and with how many of its tokens were
right when it was last drafted: no more of them are drafted from then on. A value is drafted where
it followed its key at least `share` times as often as all others together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ....ir.plan import DraftRecord, policy
from ....ir.plan.bounds import Levels, Nodes, Place
from ....runtime.speculate.drafters.base import DRAFTERS, ChainDrafter
from ....runtime.speculate.setting import Setting


@policy
@dataclass(frozen=True)
class NgramMapDraft(DraftRecord):
    """What mostly followed the text's last `key` tokens (llama.cpp's ngram-map-k4v).

    key: tokens that must match. tokens: of what followed, and so of a draft at most. values:
    different continuations that are counted after a key; 1: the latest one is taken, whatever
    others there are (ngram-map-k). hits: times that a key must have been continued. share: how many
    times as often as all others together the best continuation must have come up.
    """

    key: Levels = 12
    tokens: Nodes = 48
    values: Nodes = 4
    hits: Place = 1
    share: Place = 3
    kind: ClassVar[str] = "ngram_map"


Gram: TypeAlias = tuple[int, ...]


class Value:
    """What followed a key. count: how often. right: tokens of it that are worth drafting."""

    __slots__ = ("count", "right", "tokens")

    def __init__(self, tokens: Gram) -> None:
        self.tokens, self.count, self.right = tokens, 0, len(tokens)


class NgramMap:
    """The keys of a growing text, and their values.

    >>> known = NgramMap(NgramMapDraft(key=1, tokens=2))
    >>> known.extend([5, 1, 2, 5, 1, 2, 5])
    >>> known.best().tokens, known.best().count
    ((1, 2), 2)
    """

    def __init__(self, record: NgramMapDraft) -> None:
        self.record = record
        self.text: list[int] = []
        self.values: dict[Gram, list[Value]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on: values that are whole now are counted."""
        key, size = self.record.key, self.record.tokens
        before = len(self.text)
        self.text += tokens
        for end in range(max(before + 1, key + size), len(self.text) + 1):
            run = tuple(self.text[end - key - size : end])
            self._count(run[:key], run[key:])

    def _count(self, key: Gram, tokens: Gram) -> None:
        values = self.values.setdefault(key, [])
        value = next((value for value in values if value.tokens == tokens), None)
        if value is None:
            if self.record.values == 1:
                values.clear()
            elif len(values) == self.record.values:
                return
            value = Value(tokens)
            values.append(value)
        value.count += 1

    def best(self) -> Value | None:
        """What to draft after the text, if anything."""
        values = self.values.get(tuple(self.text[-self.record.key :]), [])
        if not values:
            return None
        best = max(values, key=lambda value: value.count)
        total = sum(value.count for value in values)
        sure = best.count >= self.record.share * (total - best.count)
        return best if sure and total >= self.record.hits else None


@DRAFTERS.register(NgramMapDraft)
class NgramMapDrafter(ChainDrafter):
    """Drafts values of the text's own keys. See the module docstring."""

    record: NgramMapDraft

    def __init__(self, record: NgramMapDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.levels = record.tokens

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.maps = [NgramMap(self.record) for _ in prompts]
        self.drafted: list[tuple[Value, int] | None] = [None] * len(prompts)
        for known, text in zip(self.maps, self.readable(prompts), strict=True):
            known.extend(text)

    def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
        if drafted := self.drafted[index]:
            value, count = drafted
            right = agreeing(value.tokens[:count], new)
            # All that there was room for: nothing was wrong with what there was none for.
            if right < count:
                value.right = right
        self.drafted[index] = None
        self.maps[index].extend(new)

    def chain(self, index: int, room: int) -> list[int]:
        value = self.maps[index].best()
        count = 0 if value is None else min(room, value.right)
        if value is None or count < 1:
            return []
        self.drafted[index] = value, count
        return list(value.tokens[:count])


def agreeing(draft: Sequence[int], text: Sequence[int]) -> int:
    """Tokens of a draft, from its first on, that the text has, too.

    >>> agreeing([1, 2, 3], [1, 2, 4]), agreeing([1], [1, 2])
    (2, 1)
    """
    pairs = zip(draft, text, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(text)))
