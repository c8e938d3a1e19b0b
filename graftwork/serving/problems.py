"""Answers that are errors: OpenAI's bodies and codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from ..ir import GraftworkError
from ..runtime.serving.ticket import End, QueueFull, Reason

RETRY = 1
"""Seconds after which a client that was turned away may come again."""


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
