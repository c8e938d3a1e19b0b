"""Tokens as bytes and texts, as OpenAI lists their probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .writing import UNSAID, Chance

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Of one tokenizer, byte-level or with spaces written as in SentencePiece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.by_bytes = "ByteLevel" in repr(tokenizer.decoder)
        self.added = tokenizer.get_added_tokens_decoder()

    def bytes_of(self, id: int) -> bytes:
        """The bytes that a token writes; of a special one, those of its name."""
        piece = self.tokenizer.id_to_token(id) or ""
        if id in self.added:
            return self.added[id].content.encode()
        if self.by_bytes and all(char in _bytes() for char in piece):
            return bytes(_bytes()[char] for char in piece)
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()

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


@lru_cache(maxsize=1)
def _bytes() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: printable ones for themselves,
    the others from U+0100 on (Radford et al. 2019, GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(256 + n): b for n, b in enumerate(others)}
