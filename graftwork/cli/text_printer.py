"""Streaming of generated text to standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..chat.text_stream import TextStream


class TextPrinter:
    """Streamer that prints generated text; the prompt is not printed.

    first: called before the first text. stops, ends: see `TextStream`. silent: print nothing.
    begun: when the first token came, of `time.perf_counter`; None before.
    """

    def __init__(
        self,
        tokenizer: Any,
        first: Callable[[], None] = lambda: None,
        *,
        stops: Iterable[str] = (),
        ends: Iterable[int] = (),
        silent: bool = False,
    ) -> None:
        self.stream, self.first = TextStream(tokenizer, stops, ends), first
        self.silent, self.prompt_seen = silent, False
        self.begun: float | None = None

    def put(self, value: Any) -> None:
        """Print new token ids; the first call has the prompt, as in transformers."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.show(value.reshape(-1).tolist())

    def show(self, ids: Iterable[int]) -> None:
        """Print new tokens."""
        if self.begun is None:
            self.begun = time.perf_counter()
            self.first()
        self._print(self.stream.put(ids))

    def end(self) -> None:
        """End of generation."""
        self._print(f"{self.stream.end()}\n")

    def _print(self, text: str) -> None:
        if self.silent:
            return
        sys.stdout.write(text)
        sys.stdout.flush()
