"""What clients get: OpenAI's objects, whole or as events, and its errors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.responses import JSONResponse

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
class Shape:
    """Objects of one answer. chat: of messages, or of texts. model: its name."""

    chat: bool
    model: str
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

    def whole(self, texts: Sequence[str], finishes: Sequence[str], usage: Usage) -> dict[str, Any]:
        """All choices."""
        made = zip(texts, finishes, strict=True)
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, *one) for index, one in enumerate(made)]
        return self._object(kind, choices, usage=usage.to_dict())

    def _choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        said: Any = {"text": text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "logprobs": None, "finish_reason": finish}

    def begins(self, index: int) -> str:
        """The event that a message begins with; texts have none."""
        delta = {"role": "assistant", "content": ""}
        return self._event(index, {"delta": delta}, None) if self.chat else ""

    def goes_on(self, index: int, text: str, finish: str | None) -> str:
        """The event of new text."""
        delta = {"content": text} if text or finish is None else {}
        return self._event(index, {"delta": delta} if self.chat else {"text": text}, finish)

    def _event(self, index: int, said: Mapping[str, Any], finish: str | None) -> str:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish}
        return event(self._object(kind, [choice]))

    def usage(self, usage: Usage) -> str:
        """The last event, if it is asked for."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event(self._object(kind, [], usage=usage.to_dict()))


def event(value: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


@dataclass(eq=False)
class Problem(Exception):
    """An answer that is an error. kind: OpenAI's type; code: and code. headers: of the answer."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        said = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return {"error": said}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, dict(self.headers))
