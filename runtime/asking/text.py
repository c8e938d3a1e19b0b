"""One sequence while it is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from .grammar import Grammar
    from .processors import Processor

Mixture: TypeAlias = Sequence[tuple[int, float]]
"""Tokens that are mixed into another, and their parts of the mixture; its own is what is left."""


@dataclass(slots=True)
class Race:
    """Of a prompt's texts. won: one of them has ended."""

    won: bool = False


@dataclass(slots=True)
class Text:
    """tokens: prompt and committed tokens, no padding. prompt: how many of them are the prompt.
    limit: the length at which the sequence is full, in tokens. done: nothing more is wanted.
    source: tokens that it is written from, which are no part of it. stands: by their places in the
    text, ids that are fed for tokens in whose places rows of pictures stand, or rows that the call
    gave. unknown: of the prompt, tokens that are not known, since only their rows are. whole:
    (first, last + 1) of tokens of the prompt that have to be fed at once. places: the positions of
    the prompt's tokens, where they are not 0, 1, 2, ... processors: what changes the scores of its
    tokens. grammar: among those, if there is one. logits, scores: f32[V], what each new token was
    chosen by, if a call wants them. race: with the prompt's other texts, if the first one that ends
    ends all. mixture: what is fed with its last token.

    rows: of the caches, those that hold something of the sequence; a step appends after them.
    position: of the next token that is fed. The last token is not fed yet. Both grow with the text;
    where rows are evicted they fall behind it.
    """

    tokens: list[int]
    prompt: int
    limit: int
    done: bool = False
    rows: int = 0
    position: int = 0
    source: Sequence[int] = ()
    stands: Mapping[int, int] = field(default_factory=dict)
    unknown: int = 0
    whole: Sequence[tuple[int, int]] = ()
    places: Sequence[int] = ()
    processors: Sequence[Processor] = ()
    grammar: Grammar | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    race: Race | None = None
    mixture: Mixture = ()

    @property
    def generated(self) -> int:
        """Committed tokens after the prompt."""
        return len(self.tokens) - self.prompt

    @property
    def known(self) -> list[int]:
        """The tokens that are known, which are all but for a prompt of rows."""
        return self.tokens[self.unknown :] if self.unknown else self.tokens

    @property
    def fed(self) -> int:
        """Tokens that the model has seen: all but the last."""
        return len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Draft tokens that a step can still use: a step yields one token more than it accepts."""
        return 0 if self.done else self.limit - len(self.tokens) - 1

    def fed_as(self, start: int, stop: int) -> list[int]:
        """What is fed for its tokens from `start` on, up to `stop`."""
        row = self.tokens[start:stop]
        if not self.stands:
            return row
        return [self.stands.get(place, token) for place, token in enumerate(row, start)]

    def cut(self, start: int, stop: int) -> int:
        """Where what is fed from `start` on ends, at `stop` unless that is amid what is whole."""
        for first, last in self.whole:
            if first < stop < last:
                return first if first > start else last
        return stop

    @property
    def shift(self) -> int:
        """What is to be added to the number of a token behind the prompt for its position."""
        return self.places[-1] - (len(self.places) - 1) if self.places else 0

    def grow(self, count: int) -> None:
        """So many tokens more have rows of their own."""
        self.rows += count
        self.position += count
