"""The HTTP side: endpoints, keys, limits, and events."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .._version import __version__
from ..ir import InputError
from .answers import ENDED, Shape, Whole, event
from .asked import Asked, Body, ChatRequest, CompletionRequest, read_body
from .choices import Choices
from .embeddings import EmbeddingRequest, Embeddings
from .metrics import Metrics
from .problems import Problem
from .service import Service
from .token_texts import TokenTexts

MOST_BODY = 4 * 2**20
"""Bytes of a request, unless told otherwise."""

T = TypeVar("T")
Kind = TypeVar("Kind", bound=Asked)


def app_of(service: Service, *, key: str | None = None, most: int = MOST_BODY) -> FastAPI:
    """The application. key: what clients must give as a bearer token. most: bytes of a body. The
    service is closed when the application shuts down."""
    metrics, tokens = Metrics(service.engine), TokenTexts(service.tokenizer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="graftwork", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_exception_handler(Problem, _answer_problem)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_fault)

    async def keyed(request: Request) -> None:
        """Errors: `Problem` for a wrong key, or none."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise Problem(
                401, "expected the server's key: Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def read(request: Request, kind: type[Body]) -> Body:
        """Errors: `Problem` for what is no such request."""
        try:
            return read_body(kind, await _body(request, most))
        except InputError as error:
            raise Problem(400, str(error)) from error

    async def answer(
        request: Request,
        kind: type[Kind],
        begin: Callable[[Kind, str], Awaitable[Choices]],
    ) -> Response:
        asked = await read(request, kind)
        choices = await begin(asked, _client(request))
        shape = Shape(kind is ChatRequest, service.name, tokens, asked.listed)
        if asked.stream:
            return Events(choices, _events(choices, shape, asked), metrics)
        made = await _until_gone(request, _whole(choices), choices)
        _observe(metrics, choices)
        return JSONResponse(shape.whole(_best(made, asked), choices.usage))

    guarded = [Depends(keyed)]

    @app.post("/v1/completions", dependencies=guarded, openapi_extra=_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue texts."""
        return await answer(request, CompletionRequest, service.completion)

    @app.post("/v1/chat/completions", dependencies=guarded, openapi_extra=_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer messages."""
        return await answer(request, ChatRequest, service.chat)

    @app.post("/v1/embeddings", dependencies=guarded, openapi_extra=_schema(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        """Texts as vectors."""
        asked, begun = await read(request, EmbeddingRequest), monotonic()
        work = Embeddings(service, asked, _client(request))
        made = await _until_gone(request, work.answer(), work)
        metrics.whole.observe(monotonic() - begun)
        return JSONResponse(made)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        """The one model that there is."""
        about = {"object": "model", "created": 0, "owned_by": "graftwork"}
        context = service.engine.context
        return {"object": "list", "data": [{"id": service.name, **about, "context": context}]}

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether requests are answered."""
        alive = service.engine.alive
        figures = service.engine.figures
        body = {"running": figures.running, "waiting": figures.waiting}
        return JSONResponse({"status": "ok" if alive else "closed", **body}, 200 if alive else 503)

    @app.get("/metrics", dependencies=guarded)
    async def prometheus() -> Response:
        """Figures for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    return app


class Events(StreamingResponse):
    """Server-sent events of choices, which are cancelled when the client is gone."""

    def __init__(self, choices: Choices, events: AsyncIterator[str], metrics: Metrics) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.choices, self.metrics = choices, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them, to their end or the client's."""
        try:
            await super().__call__(scope, receive, send)
            _observe(self.metrics, self.choices)
        finally:
            self.choices.cancel()


async def _events(choices: Choices, shape: Shape, asked: Asked) -> AsyncIterator[str]:
    for index in range(len(choices.tickets)):
        if begins := shape.begins(index):
            yield begins
    try:
        async for piece in choices.pieces():
            yield shape.goes_on(piece)
    except Problem as problem:  # the status is sent already
        yield event(problem.body())
        return
    if asked.stream_options.include_usage:
        yield shape.usage(choices.usage)
    yield ENDED


async def _whole(choices: Choices) -> list[Whole]:
    """All answers."""
    made = [Whole() for _ in choices.tickets]
    async for piece in choices.pieces():
        made[piece.choice].add(piece)
    for one, writing in zip(made, choices.writings, strict=True):
        one.mean = writing.mean
    return made


def _best(made: list[Whole], asked: Asked) -> list[Whole]:
    """Of the answers to each prompt, the `n` whose tokens were likeliest (``best_of``)."""
    if asked.made == asked.n:
        return made
    prompts = [made[first : first + asked.made] for first in range(0, len(made), asked.made)]
    ranked = [sorted(some, key=lambda one: -one.mean)[: asked.n] for some in prompts]
    return [one for some in ranked for one in some]


async def _until_gone(request: Request, work: Awaitable[T], choices: Choices | Embeddings) -> T:
    """What `work` gives, unless the client hangs up before. Errors: `Problem`."""
    going = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({going, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not going.done():
            raise Problem(499, "the client hung up", "server_error", "cancelled")
        return going.result()
    finally:
        choices.cancel()
        for task in (going, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, most: int) -> bytes:
    """The body. Errors: `Problem` for one that is too large, of which the rest is not read."""
    said = request.headers.get("content-length", "")
    too_large = Problem(413, f"expected a body of at most {most} bytes", code="body_too_large")
    if said.isdecimal() and int(said) > most:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large
    return bytes(body)


def _observe(metrics: Metrics, choices: Choices) -> None:
    metrics.first.observe((choices.first or monotonic()) - choices.begun)
    metrics.whole.observe(monotonic() - choices.begun)


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _answer_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return problem.response()


def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return Problem(error.status_code, message, headers=error.headers or {}).response()


def _answer_fault(request: Request, error: Exception) -> Response:
    """Of what should not happen; the log has the traceback."""
    return Problem(500, f"{type(error).__name__}: {error}", "server_error").response()


__all__ = ["MOST_BODY", "app_of"]
