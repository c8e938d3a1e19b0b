"""POST /v1/embeddings: texts as vectors, the states of their tokens pooled."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from ..ir import GraftworkError, InputError, UnsupportedError
from ..ir.support.tokenizer import encode
from ..runtime.reading import normalized, reading_of
from ..runtime.serving.ticket import End, Reason, Ticket
from .asked import Ids
from .problems import Problem, problem_of
from .strict import Strict

if TYPE_CHECKING:
    from ..runtime.asking.request import Request
    from .service import Service

MOST_INPUTS = 2048
"""Texts of a request, as at OpenAI."""

ONE_TOKEN = {"max_new_tokens": 1, "do_sample": False}
"""Texts are not continued; requests are always of some token more."""


class EmbeddingRequest(Strict):
    """POST /v1/embeddings. input: a text, token ids, or several of either. dimensions: only as many
    as the model's states have."""

    input: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=MOST_INPUTS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = Field(None, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        """What clients leave out they may send as null."""
        if not isinstance(fields, Mapping):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def inputs(self) -> list[str | list[int]]:
        """One by one."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return [*self.input]


class Embeddings:
    """The texts of a request on their way through the engine, one after the other, so that others'
    requests have their turns. Errors: `Problem` for a request that cannot be answered."""

    def __init__(self, service: Service, asked: EmbeddingRequest, client: str) -> None:
        service.check_name(asked.model)
        try:
            reading_of(service.model.executable.program)
        except UnsupportedError as error:
            raise Problem(501, str(error), code="not_implemented") from error
        self.service, self.asked, self.client = service, asked, asked.user or client
        self.loop = asyncio.get_running_loop()
        self.ticket: Ticket | None = None
        self.gone = False

    async def answer(self) -> dict[str, Any]:
        """OpenAI's object. Errors: `Problem`."""
        try:
            # Long texts take a while to read: the loop goes on meanwhile.
            requests = await asyncio.to_thread(self._read)
            states = [await self._states(request) for request in requests]
        except GraftworkError as error:
            raise problem_of(error) from error
        count = sum(request.texts[0].prompt for request in requests)
        vectors = normalized(torch.stack(states))
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.service.name, "usage": usage}

    def cancel(self) -> None:
        """Nobody waits any more."""
        self.gone = True
        if self.ticket is not None:
            self.ticket.cancel()

    def _read(self) -> Sequence[Request]:
        return [self._request(place, given) for place, given in enumerate(self.asked.inputs)]

    def _request(self, place: int, given: str | list[int]) -> Request:
        ids = encode(self.service.tokenizer, given) if isinstance(given, str) else given
        engine = self.service.engine
        if not ids:
            raise InputError(f"input: text {place} has no tokens; expected some text")
        if len(ids) >= engine.context:
            raise Problem(
                400,
                f"input: text {place} has {len(ids)} tokens, and a request may have "
                f"{engine.context - 1} here: shorten it, or cut it into several",
                code="context_length_exceeded",
            )
        return engine.read(ids, ONE_TOKEN)

    async def _states(self, request: Request) -> torch.Tensor:
        """f32[H] of a text. Errors: those of the engine; `Problem` for one that failed."""
        ended: asyncio.Future[End] = self.loop.create_future()

        def told(new: list[int], end: End | None) -> None:
            if end is not None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    self.loop.call_soon_threadsafe(_resolve, ended, end)

        service = self.service
        self.ticket = ticket = service.engine.submit(
            request,
            told,
            client=self.client,
            seconds=service.seconds,
            pooling=service.pooling,
        )
        if self.gone:
            ticket.cancel()
        end = await ended
        if end.reason not in (Reason.STOP, Reason.LENGTH) or ticket.states is None:
            raise problem_of(end)
        if self.asked.dimensions not in (None, len(ticket.states)):
            raise InputError(
                f"dimensions={self.asked.dimensions}: the model's states have {len(ticket.states)} "
                f"numbers, and a part of them means nothing: leave dimensions out"
            )
        return ticket.states

    def _written(self, vector: torch.Tensor) -> list[float] | str:
        """Numbers, or the base64 of their float32 bytes, the lowest first."""
        if self.asked.encoding_format == "float":
            numbers: list[float] = vector.tolist()
            return numbers
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def _resolve(ended: asyncio.Future[End], end: End) -> None:
    if not ended.done():
        ended.set_result(end)
