"""Handing tokens to a streamer as they are committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .options import Streamer
from .text import Text


class Emitter:
    """Calls `streamer.put` as transformers does: the prompt i64[B,S] first, then new tokens.

    One sequence: i64[N] with the N tokens that a step committed (plain decoding: 1). Several:
    i64[B] for every place that all unfinished sequences have reached, with `pad` for finished
    ones; transformers' `TextStreamer` refuses batches.
    """

    def __init__(self, streamer: Streamer, input_ids: torch.Tensor, pad: int) -> None:
        self.streamer, self.pad = streamer, pad
        self.shown = 0
        streamer.put(input_ids)

    def push(self, texts: Sequence[Text], commits: Sequence[Sequence[int]]) -> None:
        """Hand on what a step committed."""
        if len(texts) == 1:
            self.streamer.put(torch.tensor(commits[0]))
            return
        open_texts = [text.generated for text in texts if not text.done]
        ready = min(open_texts) if open_texts else max(text.generated for text in texts)
        for place in range(self.shown, ready):
            self.streamer.put(torch.tensor([self._token(text, place) for text in texts]))
        self.shown = ready

    def end(self) -> None:
        """Nothing more will come."""
        self.streamer.end()

    def _token(self, text: Text, place: int) -> int:
        return text.tokens[text.prompt + place] if place < text.generated else self.pad
