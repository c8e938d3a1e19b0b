"""One sequence while it is decoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Text:
    """tokens: prompt and committed tokens, no padding. prompt: how many of them are the prompt.
    limit: the length at which the sequence is full, in tokens. done: nothing more is wanted.

    While a sequence is decoded its cache holds a row for every token but the last.
    """

    tokens: list[int]
    prompt: int
    limit: int
    done: bool = False

    @property
    def generated(self) -> int:
        """Committed tokens after the prompt."""
        return len(self.tokens) - self.prompt

    @property
    def room(self) -> int:
        """Draft tokens that a step can still use: a step yields one token more than it accepts."""
        return 0 if self.done else self.limit - len(self.tokens) - 1
