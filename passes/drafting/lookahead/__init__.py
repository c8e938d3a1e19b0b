"""Lookahead decoding: n-grams from a window of guesses, verified in the same step.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
(2024).

A step carries two groups of nodes. Verification: the pool's n-grams that begin with the text's last
token. Lookahead: for each of `window` places ahead a guess and those below it from the last steps,
``ngram - 1`` in all. The first row is a chain after the root, the others a branch below each::

    root - a1 - a2        first row: the root itself and window - 1 guesses
     |      |    |
    b0     b1   b2        what the target said after them a step ago
     |      |    |
    c0     c1   c2

What the target says after the last row completes an n-gram for each place; then the rows move up
and all places move on by one. A text begins with the first row, ``window + ngram - 3`` random
tokens of the prompt; each of the next ``ngram - 2`` steps drops its first place and adds a row. No
n-gram is pooled or verified before the window is full. The pool also learns the text's n-grams.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ....ir.plan import GuessDraft, policy
from ....ir.plan.bounds import Ngram, Nodes
from ....runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ....runtime.speculate.drafters.base import DRAFTERS, Drafter
from ....runtime.speculate.trie import Trie


@policy
@dataclass(frozen=True)
class LookaheadDraft(GuessDraft):
    """N-grams that the target itself came up with in a window of guesses ahead.

    Lookahead decoding (Fu et al. 2024): guesses and n-grams to verify share a step as branches of
    one tree. window: places ahead that are guessed. ngram: tokens of an n-gram, the one it is found
    by included. pool: n-grams kept and verified for each first token. Needs the step's ``argmax``
    (pass add_argmax).
    """

    window: Nodes = 7
    ngram: Ngram = 5
    pool: Nodes = 7
    kind: ClassVar[str] = "lookahead"
    requires: ClassVar[frozenset[str]] = frozenset({"argmax", "cached", "trees"})
    branches: ClassVar[bool] = True

    @property
    def most(self) -> int:
        """Nodes of the n-grams verified and of the window, or of a window that is being filled."""
        levels = self.ngram - 1
        filling = [(1 + row) * (self.window + levels - 1 - row) - 1 for row in range(levels - 1)]
        return max((self.pool + self.window) * levels - 1, *filling, 0)


Gram: TypeAlias = tuple[int, ...]


class Pool:
    """For each token the last few n-grams that began with it, without that token."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.grams: dict[int, dict[Gram, None]] = {}

    def add(self, first: int, rest: Gram) -> None:
        """An n-gram; the one of its first token that was not seen for longest may go."""
        known = self.grams.setdefault(first, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.size:
            del known[next(iter(known))]

    def after(self, first: int) -> list[Gram]:
        """The n-grams of a token, the latest first."""
        return list(self.grams.get(first, ()))[::-1]


class _Window:
    """A sequence's guesses by row, the first one without the root, and the text's last tokens."""

    def __init__(self, prompt: Sequence[int], record: LookaheadDraft) -> None:
        # The prompt's own tokens, in an order that is the same every time.
        guesses = random.Random(0).choices(prompt or [0], k=record.window + record.ngram - 3)
        self.rows = [guesses]
        self.levels = record.ngram - 1
        self.recent = list(prompt[-record.ngram :])
        self.pool = Pool(record.pool)
        self.learn(prompt, record.ngram)

    @property
    def full(self) -> bool:
        """Whether what the target says after the last row completes n-grams."""
        return len(self.rows) == self.levels

    @property
    def branches(self) -> list[list[int]]:
        """The tokens below each place's own, the root's first."""
        return [[row[place] for row in self.rows[1:]] for place in range(1 + len(self.rows[0]))]

    def learn(self, text: Sequence[int], size: int) -> None:
        """Pool the n-grams of a text."""
        for end in range(size, len(text) + 1):
            self.pool.add(text[end - size], tuple(text[end - size + 1 : end]))

    def draft(self, room: int) -> Draft:
        """The n-grams of the pool, then the window's tree if there is room for its depth."""
        trie = Trie()
        for gram in self.pool.after(self.recent[-1]) if self.full else ():
            trie.path(-1, gram[:room])
        if room >= len(self.rows[0]) + len(self.rows) - 1:
            at = -1
            for token, branch in zip([None, *self.rows[0]], self.branches, strict=True):
                at = -1 if token is None else trie.add(at, token)
                trie.path(at, branch)
        return trie.draft()

    def ends(self, draft: Draft) -> list[int] | None:
        """The last node of each place's branch (-1: the root); None if not all were fed."""
        trie, found, at = Trie(), [], -1
        trie.insert(draft)
        for token, branch in zip([None, *self.rows[0]], self.branches, strict=True):
            down = -1 if token is None else trie.find(at, token)
            at = -1 if down is None else down
            for below in branch:
                down = None if down is None else trie.find(down, below)
            if down is None:
                return None
            found.append(down)
        return found

    def advance(self, said: list[int]) -> None:
        """What was said after each branch is the next row; n-grams of a full window are pooled."""
        if not self.full:
            self.rows = [row[1:] for row in [*self.rows, said]]
            return
        firsts = [self.recent[-1], *self.rows[0]]
        for first, branch, last in zip(firsts, self.branches, said, strict=True):
            self.pool.add(first, (*branch, last))
        upper, *others = [*self.rows[1:], said]
        self.rows = [upper[1:], *others]


@DRAFTERS.register(LookaheadDraft)
class LookaheadDrafter(Drafter):
    """Keeps a window and a pool a sequence. See the module docstring."""

    record: LookaheadDraft
    wants = ("argmax",)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.windows = [_Window(prompt, self.record) for prompt in self.readable(prompts)]

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        return [
            window.draft(room) if room > 0 else NO_DRAFT
            for window, room in zip(self.windows, rooms, strict=True)
        ]

    def observe(self, taken: VerifiedStep) -> None:
        said = taken.outputs["argmax"].tolist()
        for index, (draft, tokens) in enumerate(zip(taken.drafts, taken.tokens, strict=True)):
            if tokens:
                after = said[index][taken.columns[index] :]
                self._observe(self.windows[index], draft, tokens, after)

    def _observe(
        self, window: _Window, draft: Draft, tokens: Sequence[int], said: Sequence[int]
    ) -> None:
        size = self.record.ngram
        ends = window.ends(draft)
        if ends is not None:
            window.advance([said[node + 1] for node in ends])
        text = [*window.recent[-size + 1 :], *tokens]
        window.learn(text, size)
        window.recent = text[-size:]
