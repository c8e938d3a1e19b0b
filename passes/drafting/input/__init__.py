"""Aggressive decoding: the draft is the input itself, for tasks that edit it.

Sources: Sun et al., "Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding"
(2021); Ge et al., "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding" (2022).

After an edit the place in the input is found by the text's last tokens: where most of them agree,
and of such places the first one at or after the old place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DraftRecord, policy
from ....ir.plan.bounds import Levels, Nodes, Place
from ....runtime.speculate.drafters.base import DRAFTERS, ChainDrafter


@policy
@dataclass(frozen=True)
class InputDraft(DraftRecord):
    """Copy the prompt from where the text stands in it: for editing.

    Aggressive decoding (Ge et al. 2022). tokens: draft tokens a step at most. start: the prompt's
    token that the text is expected to begin with. longest: tokens that must agree, at best, to find
    the place again after an edit.
    """

    tokens: Nodes = 20
    start: Place = 0
    longest: Levels = 4
    kind: ClassVar[str] = "input"
    brings: ClassVar[str] = "an input text"
    repeatable: ClassVar[bool] = True


class InputPlace:
    """Where a text stands in its input: `at` is the input's next token.

    >>> place = InputPlace([1, 2, 3, 4, 5, 3, 9], start=0, longest=2)
    >>> place.move([1, 2]); place.at
    2
    >>> place.move([7, 4]); place.at
    4
    """

    def __init__(self, source: Sequence[int], start: int, longest: int) -> None:
        self.source, self.longest = list(source), longest
        self.at = min(start, len(source))
        self.lost = False
        self.text: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(1, len(source) + 1):
            for size in range(1, min(longest, end) + 1):
                self.ends.setdefault(tuple(source[end - size : end]), []).append(end)

    def move(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        self.text = [*self.text, *tokens][-max(self.longest, len(tokens)) :]
        end = self.at + len(tokens)
        if not self.lost and self.source[self.at : end] == list(tokens):
            self.at = end
            return
        found = self._found()
        self.lost = found is None
        self.at = self.at if found is None else found

    def _found(self) -> int | None:
        for size in range(min(self.longest, len(self.text)), 0, -1):
            ends = self.ends.get(tuple(self.text[-size:]))
            if ends:
                return ends[min(bisect_left(ends, self.at), len(ends) - 1)]
        return None


@DRAFTERS.register(InputDraft)
class InputDrafter(ChainDrafter):
    """Copies the prompt. See the module docstring."""

    record: InputDraft

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """At the tokens `start` of what texts are written from, or else of their prompts."""
        record = self.record
        self.levels = record.tokens
        self.places = []
        for source, prompt in zip(self.sources(len(prompts)), self.known(prompts), strict=True):
            self.places.append(InputPlace(source or prompt, record.start, record.longest))
            if source and len(prompt) > 1:  # the first token only begins the text
                self.places[-1].move(prompt[1:])

    def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
        self.places[index].move(new)

    def chain(self, index: int, room: int) -> list[int]:
        place = self.places[index]
        count = 0 if place.lost else min(room, self.levels)
        return place.source[place.at : place.at + count] if count > 0 else []
