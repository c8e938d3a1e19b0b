"""Lookahead decoding: n-grams from a window of guesses, verified in the same step.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
(2024).

Every step carries two groups of nodes. The verification branch: the n-grams of the pool that begin
with the text's last token. The lookahead branch: for each of `window` places ahead a guessed token
and the guesses that followed it in the last steps, ``ngram - 1`` in all. The guesses of the first
row are a chain after the root, the others a branch below each::

    root - a1 - a2        first row: the root itself and window - 1 guesses
     |      |    |
    b0     b1   b2        what the target said after them a step ago
     |      |    |
    c0     c1   c2

What the target says after the last row completes an n-gram for each place; then the rows move up.
The pool learns the n-grams of the text, too, the prompt's included.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias

from ....ir.plan import LookaheadDraft
from ..draft import NO_DRAFT, Draft
from ..trie import Trie
from .base import DRAFTERS, Drafter, VerifiedStep

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
    """A sequence's guesses: `rows` of `width` tokens, and the text's last tokens."""

    def __init__(self, prompt: Sequence[int], record: LookaheadDraft) -> None:
        # Any tokens will do; the prompt's own, in an order that is the same every time.
        self.random = random.Random(0)
        self.width, self.prompt = record.window, prompt
        self.rows = [self._guesses(record.window) for _ in range(record.ngram - 1)]
        self.recent = list(prompt[-record.ngram :])
        self.pool = Pool(record.pool)
        self.learn(prompt, record.ngram)

    def _guesses(self, count: int) -> list[int]:
        return self.random.choices(self.prompt, k=count)

    def learn(self, text: Sequence[int], size: int) -> None:
        """Pool the n-grams of a text."""
        for end in range(size, len(text) + 1):
            self.pool.add(text[end - size], tuple(text[end - size + 1 : end]))

    def draft(self, room: int) -> Draft:
        """The n-grams of the pool, then the window's tree if there is room for its depth."""
        trie = Trie()
        for gram in self.pool.after(self.recent[-1]):
            trie.path(-1, gram[:room])
        if room >= self.width + len(self.rows) - 2:
            at = -1
            for place in range(self.width):
                at = trie.add(at, self.rows[0][place]) if place else -1
                trie.path(at, [row[place] for row in self.rows[1:]])
        return trie.draft()

    def ends(self, draft: Draft) -> list[int] | None:
        """The last node of each place's branch (-1: the root); None if not all were fed."""
        trie, found, at = Trie(), [], -1
        trie.insert(draft)
        for place in range(self.width):
            column = [self.rows[0][place]] if place else []
            end = at
            for depth, token in enumerate([*column, *(row[place] for row in self.rows[1:])]):
                node = trie.find(end, token)
                if node is None:
                    return None
                end = node
                at = node if place and not depth else at
            found.append(end)
        return found

    def advance(self, said: Sequence[int], gained: int) -> None:
        """The rows move up, and to the left by what the text gained beyond one token.

        said: what the target said after each place's branch.
        """
        rows = [*self.rows[1:], list(said)]
        extra = gained - 1
        self.rows = [row[extra:] + self._guesses(min(extra, self.width)) for row in rows]


@DRAFTERS.register(LookaheadDraft)
class LookaheadDrafter(Drafter):
    """Keeps a window and a pool a sequence. See the module docstring."""

    record: LookaheadDraft
    wants = ("argmax",)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Windows of the prompts' own tokens."""
        self.windows = [_Window(prompt, self.record) for prompt in self.readable(prompts)]

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        """Both branches of each sequence."""
        return [
            window.draft(room) if room > 0 else NO_DRAFT
            for window, room in zip(self.windows, rooms, strict=True)
        ]

    def observe(self, taken: VerifiedStep) -> None:
        """Pool what the window and the text have new, and move the window."""
        said = taken.outputs["argmax"].tolist()
        for index, (draft, tokens) in enumerate(zip(taken.drafts, taken.tokens, strict=True)):
            if tokens:
                self._observe(self.windows[index], draft, tokens, said[index])

    def _observe(
        self, window: _Window, draft: Draft, tokens: Sequence[int], said: Sequence[int]
    ) -> None:
        size = self.record.ngram
        ends = window.ends(draft) if draft.tokens else None
        if ends is not None:
            last = [said[node + 1] for node in ends]
            firsts = [window.recent[-1], *window.rows[0][1:]]
            for place, first in enumerate(firsts):
                rest = (*(row[place] for row in window.rows[1:]), last[place])
                window.pool.add(first, rest)
            window.advance(last, len(tokens))
        text = [*window.recent[-size + 1 :], *tokens]
        window.learn(text, size)
        window.recent = text[-size:]
