"""Tokens as bytes and texts, as OpenAI lists their probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.support.spelling import Pieces
from .writing import UNSAID, Chance


class TokenTexts(Pieces):
    """Of one tokenizer, byte-level or with spaces written as in SentencePiece."""

    def text(self, id: int) -> str:
        """Its text; of bytes that are no text, ``bytes:\\xf0\\x9f``, as OpenAI writes them."""
        found = self.bytes_of(id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def of_chat(self, chances: Sequence[Chance]) -> dict[str, Any]:
        """As messages have them."""
        content = []
        for one in chances:
            best = zip(one.likely.ids, one.likely.logprobs, strict=True)
            top = [self._entry(id, logprob) for id, logprob in best]
            content.append({**self._entry(one.id, one.likely.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def of_texts(self, chances: Sequence[Chance]) -> dict[str, Any]:
        """As texts have them. The token that stands there is always among the likeliest."""
        top: list[dict[str, float] | None] = []
        for one in chances:
            if one.likely is UNSAID:
                top.append(None)
                continue
            best = zip(one.likely.ids, one.likely.logprobs, strict=True)
            found = {self.text(id): _finite(logprob) for id, logprob in best}
            top.append({**found, self.text(one.id): _finite(one.likely.logprob)})
        return {
            "tokens": [self.text(one.id) for one in chances],
            "token_logprobs": [
                None if one.likely is UNSAID else _finite(one.likely.logprob) for one in chances
            ],
            "top_logprobs": top,
            "text_offset": [one.place for one in chances],
        }

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        bytes_ = list(self.bytes_of(id))
        return {"token": self.text(id), "logprob": _finite(logprob), "bytes": bytes_}


def _finite(logprob: float) -> float:
    """What is impossible is -inf, which JSON cannot say."""
    return max(logprob, LEAST)


LEAST = -9999.0
"""OpenAI's log probability of what is very unlikely."""
