"""Streaming of generated text to standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from ..ir.support.tokenizer import decode


class TextPrinter:
    """Streamer that prints generated text; the prompt is not printed. first: called before the
    first text."""

    def __init__(self, tokenizer: Any, first: Callable[[], None] = lambda: None) -> None:
        self.tokenizer, self.first = tokenizer, first
        self.ids: list[int] = []
        self.shown = ""
        self.prompt_seen = False

    def put(self, value: Any) -> None:
        """Print new token ids; the first call has the prompt, as in transformers."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.show(value.reshape(-1).tolist())

    def show(self, ids: Iterable[int]) -> None:
        """Print new tokens."""
        if not self.ids:
            self.first()
        self.ids += ids
        text = decode(self.tokenizer, self.ids)
        # A trailing replacement character is an incomplete character.
        if not text.endswith("\ufffd"):
            self._show(text)

    def end(self) -> None:
        """End of generation."""
        self._show(decode(self.tokenizer, self.ids))
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _show(self, text: str) -> None:
        sys.stdout.write(text[len(self.shown) :])
        sys.stdout.flush()
        self.shown = text
