"""Requests of an asyncio loop, answered by the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from ..chat.conversation import Conversation, ends_of_turn
from ..chat.files import template_of
from ..chat.text_stream import TextStream
from ..ir import GraftworkError, InputError
from ..ir.support.tokenizer import encode
from ..model import Model
from ..runtime.serving.engine import Engine
from ..runtime.serving.ticket import End, QueueFull, Reason, Ticket
from .answers import Problem, Usage
from .asked import Asked, ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from ..runtime.asking.request import Request

RETRY = 1
"""Seconds after which a client that was turned away may come again."""


class Prompt(NamedTuple):
    """ids: of its tokens. ends: ids that end the answer; None: as the checkpoint says."""

    ids: list[int]
    ends: tuple[int, ...] | None = None


class Piece(NamedTuple):
    """New text of a choice, by its number. finish: why it ended; None: it goes on."""

    choice: int
    text: str
    finish: str | None = None


class Service:
    """A model, by a name, and the engine that decodes for it.

    usual: new tokens of a message if the request does not say; seconds: that a request may take.
    template: the chat template, instead of the checkpoint's. Errors: those of `Engine`, and for a
    template that is none.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        *,
        usual: int = 1024,
        seconds: float | None = None,
        template: str | None = None,
        **engine: Any,
    ) -> None:
        self.model, self.name, self.usual, self.seconds = model, name, usual, seconds
        self.tokenizer, self.template = model.tokenizer, template
        if template is not None:
            template_of(model.program, given=template)
        self.engine = Engine(model.executable, **engine)

    async def completion(self, asked: CompletionRequest, client: str) -> Choices:
        """Begin to answer. Errors: `Problem`."""
        return await self._begin(
            asked, lambda: [Prompt(self._ids(text)) for text in asked.prompts], client
        )

    async def chat(self, asked: ChatRequest, client: str) -> Choices:
        """Begin to answer messages. Errors: `Problem`."""
        return await self._begin(asked, lambda: [self._prompt(asked)], client)

    def _ids(self, text: str | list[int]) -> list[int]:
        ids = encode(self.tokenizer, text) if isinstance(text, str) else text
        if not ids:
            raise InputError("prompt: expected some text; it has no tokens")
        return ids

    def _prompt(self, asked: ChatRequest) -> Prompt:
        tools = bool(asked.variables["tools"])
        template = template_of(self.model.program, given=self.template, tools=tools)
        talk = Conversation(self.model, template, [one.plain() for one in asked.messages])
        return Prompt(talk.prompt(**asked.variables)[1], ends_of_turn(self.model, template))

    async def _begin(
        self, asked: Asked, prompts: Callable[[], Sequence[Prompt]], client: str
    ) -> Choices:
        if asked.model not in (None, "", self.name):
            message = f"the model {asked.model!r} is not here; there is {self.name!r}"
            raise Problem(404, message, code="model_not_found")
        choices = Choices(self, asked.stop)
        try:
            # Long texts take a while to read: the loop goes on meanwhile.
            requests = await asyncio.to_thread(lambda: self._read_all(asked, prompts()))
            for number, (request, ends) in enumerate(requests):
                choices.add(request, ends, asked.user or client)
                choices.usage.prompt += 0 if number % asked.n else request.texts[0].prompt
        except GraftworkError as error:
            choices.cancel()
            raise _problem(error) from error
        return choices

    def _read_all(
        self, asked: Asked, prompts: Sequence[Prompt]
    ) -> list[tuple[Request, tuple[int, ...] | None]]:
        """All that is asked for, checked, and the ids that end each."""
        each = [(prompt, number) for prompt in prompts for number in range(asked.n)]
        return [(self._read(asked, prompt, number), prompt.ends) for prompt, number in each]

    def _read(self, asked: Asked, prompt: Prompt, number: int) -> Request:
        options = asked.options(number)
        left = self.engine.context - len(prompt.ids)
        if left < 1:
            raise Problem(
                400,
                f"the prompt has {len(prompt.ids)} tokens, and a request may have "
                f"{self.engine.context}, new ones included: shorten the prompt",
                code="context_length_exceeded",
            )
        options["max_new_tokens"] = asked.tokens or min(left, self.usual)
        if "json_schema" in options:
            options["tokenizer"] = self.tokenizer
        if prompt.ends is not None:
            options["eos_token_id"] = list(prompt.ends)
        return self.engine.read(prompt.ids, options)


class Choices:
    """The answers to a request, while they are generated. usage: grows until `pieces` ends."""

    def __init__(self, service: Service, stops: Sequence[str]) -> None:
        self.service, self.stops, self.usage = service, stops, Usage()
        self.tickets: list[Ticket] = []
        self.streams: list[TextStream] = []
        self.begun, self.first = monotonic(), 0.0
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[tuple[int, list[int], End | None]] = asyncio.Queue()

    def add(self, request: Request, ends: tuple[int, ...] | None, client: str) -> None:
        """One more. Errors: as `Engine.submit`."""
        index, service = len(self.tickets), self.service

        def told(new: list[int], end: End | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._told.put_nowait, (index, new, end))

        eos = request.stopping.eos if ends is None else ends
        self.streams.append(TextStream(service.tokenizer, self.stops, eos))
        ticket = service.engine.submit(request, told, client=client, seconds=service.seconds)
        self.tickets.append(ticket)

    def cancel(self) -> None:
        """Nobody waits any more."""
        for ticket in self.tickets:
            ticket.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """New text of any of them, until all have ended. Errors: `Problem` for one that failed."""
        going = set(range(len(self.tickets)))
        try:
            while going:
                index, new, end = await self._told.get()
                self.first = self.first or monotonic()
                if index not in going:
                    continue
                text, finish = self._more(index, new, end)
                if finish is not None:
                    going.discard(index)
                    self.usage.reused += self._reused(end)
                if text or finish is not None:
                    yield Piece(index, text, finish)
        finally:
            self.cancel()

    def _more(self, index: int, new: list[int], end: End | None) -> tuple[str, str | None]:
        stream = self.streams[index]
        text = stream.put(new)
        self.usage.new += len(new)
        if stream.stopped:
            self.tickets[index].cancel()
            return text, "stop"
        if end is None:
            return text, None
        if end.reason not in (Reason.STOP, Reason.LENGTH):
            raise _problem(end)
        return text + stream.end(), "stop" if stream.stopped else str(end.reason)

    def _reused(self, end: End | None) -> int:
        return 0 if end is None or end.stats is None else end.stats.reused_tokens


def _problem(error: BaseException | End) -> BaseException:
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
