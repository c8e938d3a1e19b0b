"""Answers that are errors: OpenAI's bodies and codes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ..ir import GraftworkError
from ..runtime.serving.ticket import End, QueueFull, Reason

RETRY = 1
"""Seconds after which a client that was turned away may come again."""


PAUSE, LINGER = 2.0, 30.0
"""Seconds that may pass between two parts of a body that is dropped, and in all."""


class Unread(JSONResponse):
    """The answer to a body that is not wanted. What still comes of it is dropped: who is cut off
    while sending does not get to read an answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while (await asyncio.wait_for(receive(), PAUSE)).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
        if self.status == 413:
            return Unread(self.body(), 413, {**self.headers, "Connection": "close"})
        return JSONResponse(self.body(), self.status, dict(self.headers))


def problem_of(error: BaseException | End) -> BaseException:
    """What a client is told."""
    if isinstance(error, End):
        if error.reason is Reason.TIMEOUT:
            return Problem(504, "the request took longer than it may", "timeout", "timeout")
        if error.reason is Reason.CLOSED:
            return Problem(503, "the server is shutting down", "server_error", "closed")
        if error.error is None:
            return Problem(499, "the request was cancelled", "server_error", "cancelled")
        error = error.error
        if not isinstance(error, GraftworkError):
            return Problem(500, f"{type(error).__name__}: {error}", "server_error")
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(RETRY)}
        return Problem(429, str(error), "rate_limit_error", "queue_full", headers)
    if isinstance(error, GraftworkError):
        return Problem(400, str(error))
    return error
