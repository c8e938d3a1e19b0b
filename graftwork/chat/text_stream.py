"""The text of tokens as they are generated, and texts that end it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..ir.support.errors import InputError
from ..ir.support.tokenizer import decode

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def check_stop(text: object) -> str:
    """Errors: `InputError` for what is no text, or an empty one."""
    if not isinstance(text, str) or not text:
        raise InputError(f"stop: expected texts, got {text!r}")
    return text


def cut(text: str, stops: Iterable[str]) -> tuple[str, bool]:
    """A text up to the first of some others, and whether there was one.

    >>> cut("one\\ntwo", ["\\n", "o\\n"])
    ('one', True)
    """
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


class TextStream:
    """The text of tokens as they come: whole characters, and nothing of what stops it. stopped:
    whether a text of `stops` was found. ends: ids that say nothing. marks: texts of special tokens
    that are written, too."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        ends: Iterable[int] = (),
        marks: Iterable[str] = (),
    ) -> None:
        self.tokenizer, self.stops, self.ends = tokenizer, tuple(stops), frozenset(ends)
        ids = {tokenizer.token_to_id(mark): mark for mark in marks}
        self.marks = {id: mark for id, mark in ids.items() if id is not None}
        self.ids: list[int] = []
        self.known, self.window, self.held, self.stopped = 0, 0, "", False

    def put(self, ids: Iterable[int]) -> str:
        """What can be shown after new tokens."""
        self.ids += [id for id in ids if id not in self.ends]
        return self._more(whole=True)

    def end(self) -> str:
        """What is left at the end."""
        return self._more(whole=False)

    def _more(self, *, whole: bool) -> str:
        # What a token adds depends on the tokens before it; a few are enough.
        before = self._text(self.ids[self.window : self.known])
        text = self._text(self.ids[self.window :])
        if not (whole and text.endswith("\ufffd")):  # the first bytes of a character
            self.held += text[len(before) :]
            self.window, self.known = self.known, len(self.ids)
        if self.stopped:
            return ""
        shown, self.stopped = cut(self.held, self.stops)
        kept = 0 if self.stopped or not whole else max(map(self._begun, self.stops), default=0)
        self.held = self.held[len(shown) - kept :]
        return shown[: len(shown) - kept]

    def _text(self, ids: list[int]) -> str:
        place = next((n for n, id in enumerate(ids) if id in self.marks), None)
        if place is None:
            return decode(self.tokenizer, ids)
        first, mark, rest = ids[:place], self.marks[ids[place]], ids[place + 1 :]
        return decode(self.tokenizer, first) + mark + self._text(rest)

    def _begun(self, stop: str) -> int:
        """Characters at the end that may be the first of a stop."""
        most = min(len(stop) - 1, len(self.held))
        return next((n for n in range(most, 0, -1) if self.held.endswith(stop[:n])), 0)


class StopTexts:
    """A stopping criterion: the new text holds one of some texts. prompt: tokens before it."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str], prompt: int) -> None:
        self.stream, self.prompt = TextStream(tokenizer, stops), prompt

    def __call__(self, input_ids: Any, scores: Any) -> bool:
        """input_ids: i64[1,L], called with each new token."""
        seen = self.prompt + len(self.stream.ids)
        self.stream.put(input_ids[0, seen:].tolist())
        return self.stream.stopped
