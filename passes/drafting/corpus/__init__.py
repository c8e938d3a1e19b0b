"""Copy what followed the text's longest match, in a corpus or in the text itself.

Source: Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton" (2024).

A suffix automaton finds the longest suffix of the text in the corpus, in amortised O(1) a token;
`suffix` finds the text's own repetitions. The longer match wins; at a tie the text's own does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ....ir.execution.executable import Executable
from ....ir.plan import DraftRecord, Size, record
from ....ir.plan.bounds import Filled, Levels, Nodes
from ....runtime.feeding.step_inputs import strange_ids
from ....runtime.speculate.drafters.base import DRAFTERS, ChainDrafter
from ....runtime.speculate.setting import Setting
from ..suffix import SuffixIndex


@record
@dataclass(frozen=True)
class CorpusDraft(DraftRecord):
    """Copy what followed the longest match of the text in a corpus or in the text itself (SAM).

    weight: i64[N] of the program, the corpus; -1 ends a document. tokens: draft tokens a step at
    most. shortest: tokens that must match.
    """

    weight: Filled[str] = "corpus"
    tokens: Nodes = 16
    shortest: Levels = 2
    kind: ClassVar[str] = "corpus"
    foresees: ClassVar[bool] = True

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        yield self.weight, True, ("",)


END = -1
"""Token that ends a document of a corpus: no match and no draft goes past it."""

LONGEST = 64
"""Tokens of the text's own repetitions that are looked at."""


class SuffixAutomaton:
    """All substrings of a sequence: states are sets of substrings that end at the same places.

    next: transitions by token. link: the state of the longest suffix that ends elsewhere, too.
    size: tokens of a state's longest substring. end: where a state's substrings end first.

    >>> automaton = SuffixAutomaton([1, 2, 3, 1, 2, 4])
    >>> state, length = automaton.step(0, 0, 1)
    >>> state, length = automaton.step(state, length, 2)
    >>> length, automaton.end[state]
    (2, 2)
    """

    __slots__ = ("end", "link", "next", "size", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.next: list[dict[int, int]] = [{}]
        self.link, self.size, self.end = [-1], [0], [0]
        last = 0
        for place, token in enumerate(self.tokens):
            last = self._add(last, token, place + 1)

    def _state(self, size: int, end: int, following: dict[int, int], link: int) -> int:
        self.next.append(following)
        self.size.append(size)
        self.end.append(end)
        self.link.append(link)
        return len(self.next) - 1

    def _add(self, last: int, token: int, end: int) -> int:
        """Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985)."""
        new = self._state(self.size[last] + 1, end, {}, 0)
        at = last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = new
            at = self.link[at]
        if at < 0:
            return new
        other = self.next[at][token]
        if self.size[other] > self.size[at] + 1:
            other = self._split(at, other, token)
        self.link[new] = other
        return new

    def _split(self, at: int, other: int, token: int) -> int:
        """A state of its own for the shorter substrings of `other`, which end at more places."""
        parts = (self.end[other], dict(self.next[other]), self.link[other])
        clone = self._state(self.size[at] + 1, *parts)
        self.link[other] = clone
        while at >= 0 and self.next[at].get(token) == other:
            self.next[at][token] = clone
            at = self.link[at]
        return clone

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """State and length of the longest match after one token more."""
        while state and token not in self.next[state]:
            state = self.link[state]
            length = self.size[state]
        if token not in self.next[state]:
            return 0, 0
        return self.next[state][token], length + 1


def _automaton(executable: Executable, weight: str) -> SuffixAutomaton:
    """The automaton of a program's corpus, made at first use and kept with the executable."""
    kept: dict[str, SuffixAutomaton] = executable.scratch(SuffixAutomaton, shared=True)
    if weight not in kept:
        program = executable.program
        tokens = program.weights[weight].load().tolist()
        vocabulary = program.info.vocab_size
        if tokens and not END <= min(tokens) <= max(tokens) < vocabulary:
            named = [token for token in tokens if token != END]
            raise strange_ids(named, vocabulary, f"the weight {weight}")
        kept[weight] = SuffixAutomaton(tokens)
    return kept[weight]


@DRAFTERS.register(CorpusDraft)
class CorpusDrafter(ChainDrafter):
    """Drafts by copying. See the module docstring."""

    record: CorpusDraft

    def __init__(self, record: CorpusDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.corpus, self.levels = _automaton(self.executable, record.weight), record.tokens

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.texts = [SuffixIndex(LONGEST) for _ in prompts]
        self.matches = [(0, 0)] * len(prompts)
        for index, known in enumerate(self.readable(prompts)):
            self._extend(index, known)

    def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
        self._extend(index, new)

    def _extend(self, index: int, tokens: Sequence[int]) -> None:
        self.texts[index].extend(tokens)
        state, length = self.matches[index]
        for token in tokens:
            state, length = self.corpus.step(state, length, token)
        self.matches[index] = (state, length)

    def evidence(self, index: int) -> int:
        """The length of the match, on a scale of powers of two."""
        return max(self.matches[index][1], self.texts[index].length).bit_length()

    def chain(self, index: int, room: int) -> list[int]:
        return self._copy(index, (), min(room, self.levels))

    def ahead(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        most = self.record.tokens
        return [
            self._copy(index, extra, min(count, most))
            for index, (extra, count) in enumerate(zip(tokens, counts, strict=True))
        ]

    def _copy(self, index: int, extra: Sequence[int], count: int) -> list[int]:
        if count < 1:
            return []
        state, length = self.matches[index]
        for token in extra:
            state, length = self.corpus.step(state, length, token)
        matched, following = self.texts[index].following(extra, count)
        if max(length, matched) < self.record.shortest:
            return []
        copied: list[int] = []
        if length > matched:
            end = self.corpus.end[state]
            copied = self.corpus.tokens[end : end + count]
            copied = copied[: copied.index(END)] if END in copied else copied
        if not copied and matched >= self.record.shortest:
            copied = following
        return copied
