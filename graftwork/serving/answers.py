"""What clients get: OpenAI's objects, whole or as events."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ..chat.tool_calls import CallDelta
from .token_texts import TokenTexts
from .writing import Chance, Piece

ENDED = "data: [DONE]\n\n"


@dataclass
class Usage:
    """prompt, new: tokens. reused: of the prompts, those whose rows were there."""

    prompt: int = 0
    new: int = 0
    reused: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As OpenAI names them."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.new,
            "total_tokens": self.prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": self.reused},
        }


@dataclass
class Whole:
    """All pieces of a choice. mean: of its tokens' log probabilities, where they are known."""

    text: str = ""
    finish: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    chances: list[Chance] = field(default_factory=list)
    mean: float = 0.0

    def add(self, piece: Piece) -> None:
        """One more piece."""
        self.text += piece.text
        self.calls += piece.calls
        self.chances += piece.chances
        self.finish = piece.finish or self.finish


@dataclass
class Shape:
    """Objects of one answer. chat: of messages, or of texts. model: its name. tokens: their texts.
    listed: whether probabilities are asked for."""

    chat: bool
    model: str
    tokens: TokenTexts
    listed: bool = False
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _object(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }

    def whole(self, made: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        """All choices."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, one) for index, one in enumerate(made)]
        return self._object(kind, choices, usage=usage.to_dict())

    def _choice(self, index: int, made: Whole) -> dict[str, Any]:
        said: Any = {"text": made.text}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": made.text, "refusal": None}
            if made.calls:
                message |= {"content": made.text or None, "tool_calls": whole_calls(made.calls)}
            said = {"message": message}
        logprobs = self._logprobs(made.chances)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": made.finish}

    def begins(self, index: int) -> str:
        """The event that a message begins with; texts have none."""
        delta = {"role": "assistant", "content": ""}
        return self._event(Piece(index, ""), {"delta": delta}) if self.chat else ""

    def goes_on(self, piece: Piece) -> str:
        """The event of what is new."""
        if not self.chat:
            return self._event(piece, {"text": piece.text})
        delta: dict[str, Any] = {}
        if piece.text or not (piece.calls or piece.finish):
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [_call(call) for call in piece.calls]
        return self._event(piece, {"delta": delta})

    def _event(self, piece: Piece, said: Mapping[str, Any]) -> str:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        logprobs = self._logprobs(piece.chances) if piece.chances else None
        choice = {"index": piece.choice, **said, "logprobs": logprobs}
        return event(self._object(kind, [{**choice, "finish_reason": piece.finish}]))

    def usage(self, usage: Usage) -> str:
        """The last event, if it is asked for."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event(self._object(kind, [], usage=usage.to_dict()))

    def _logprobs(self, chances: Sequence[Chance]) -> dict[str, Any] | None:
        if not self.listed:
            return None
        return self.tokens.of_chat(chances) if self.chat else self.tokens.of_texts(chances)


def _call(part: CallDelta) -> dict[str, Any]:
    found: dict[str, Any] = {"index": part.number}
    if part.id is not None:
        found |= {"id": part.id, "type": "function"}
    named = {} if part.name is None else {"name": part.name}
    return {**found, "function": {**named, "arguments": part.arguments}}


def whole_calls(parts: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """Calls of a message, put together.

    >>> parts = [CallDelta(0, "", "call_1", "now"), CallDelta(0, "{}")]
    >>> whole_calls(parts)[0]["function"]
    {'name': 'now', 'arguments': '{}'}
    """
    found: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.id is not None:
            function = {"name": part.name, "arguments": ""}
            found[part.number] = {"id": part.id, "type": "function", "function": function}
        found[part.number]["function"]["arguments"] += part.arguments
    return list(found.values())


def event(value: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value)}\n\n"
