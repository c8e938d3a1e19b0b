"""The answers to a request, as the engine's thread tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from ..runtime.serving.ticket import End, Reason, Ticket
from .answers import Usage
from .asked import Asked, ChatRequest
from .problems import problem_of
from .writing import UNSAID, Chance, Piece, Writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..chat.tool_calls import ToolFormat
    from ..runtime.asking.request import Request
    from ..runtime.serving.engine import Engine


class Prompt(NamedTuple):
    """ids: of its tokens. ends: ids that end the answer; None: as the checkpoint says. form: of
    calls in the answer. options: of `generate` besides those of the request. echo: text that the
    answer begins with."""

    ids: list[int]
    ends: tuple[int, ...] | None = None
    form: ToolFormat | None = None
    options: Mapping[str, Any] = {}
    echo: str = ""


class Choices:
    """See the module docstring. seconds: that they may take; None: as long as they do. usage:
    grows until `pieces` ends."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, seconds: float | None, asked: Asked
    ) -> None:
        self.engine, self.tokenizer, self.seconds = engine, tokenizer, seconds
        self.asked, self.usage = asked, Usage()
        self.tickets: list[Ticket] = []
        self.writings: list[Writing] = []
        self.echoes: list[str] = []
        self.begun, self.first = monotonic(), 0.0
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[tuple[int, list[int], End | None]] = asyncio.Queue()

    def add(self, request: Request, prompt: Prompt, client: str) -> None:
        """One more. Errors: as `Engine.submit`."""
        index, asked = len(self.tickets), self.asked

        def told(new: list[int], end: End | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._told.put_nowait, (index, new, end))

        ends = request.stopping.eos if prompt.ends is None else prompt.ends
        calls = asked.calls if isinstance(asked, ChatRequest) else None
        single = calls is not None and not calls.several
        writing = Writing(
            self.tokenizer, asked.stop, ends, prompt.form, single=single, whole=asked.scored
        )
        self.writings.append(writing)
        self.echoes.append(prompt.echo)
        ticket = self.engine.submit(
            request,
            told,
            client=client,
            seconds=self.seconds,
            likeliest=asked.likeliest or 0,
            scored=asked.scored,
        )
        self.tickets.append(ticket)

    def cancel(self) -> None:
        """Nobody waits any more."""
        for ticket in self.tickets:
            ticket.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is new of any of them, until all have ended. Errors: `Problem` for one that
        failed."""
        for index, echo in enumerate(self.echoes):
            if echo and not self.asked.scored:
                yield Piece(index, echo)
        echoed = set[int]()
        going = set(range(len(self.tickets)))
        try:
            while going:
                index, new, end = await self._told.get()
                self.first = self.first or monotonic()
                if index not in going:
                    continue
                piece = self._more(index, new, end)
                if self.asked.scored and index not in echoed:
                    echoed.add(index)
                    yield Piece(index, self.echoes[index], chances=self._of_prompt(index))
                if piece.finish is not None:
                    going.discard(index)
                    self.usage.reused += self._reused(end)
                if not piece.empty:
                    yield piece
        finally:
            self.cancel()

    def _more(self, index: int, new: list[int], end: End | None) -> Piece:
        writing, ticket = self.writings[index], self.tickets[index]
        likely = [ticket.likely.popleft() for _ in new] if ticket.likely else []
        if self.asked.silent:
            new, likely = [], []
        text, calls = writing.put(new, likely)
        self.usage.new += len(new)
        finish = None
        if writing.done:
            ticket.cancel()
        elif end is not None and end.reason not in (Reason.STOP, Reason.LENGTH):
            raise problem_of(end)
        if writing.done or end is not None:
            rest, more = writing.end()
            text, calls = text + rest, [*calls, *more]
            reason = "stop" if end is None else str(end.reason)
            finish = "length" if self.asked.silent else writing.finish(reason)
        chances = writing.chances(ended=finish is not None)
        if self.asked.scored:
            behind = len(self.echoes[index])
            chances = [one._replace(place=one.place + behind) for one in chances]
        return Piece(index, text, finish, calls, chances)

    def _of_prompt(self, index: int) -> list[Chance]:
        """Of the prompt's tokens; nothing is said of the first."""
        ticket, writing = self.tickets[index], Writing(self.tokenizer, (), (), whole=True)
        writing.put(ticket.text.tokens[: ticket.text.prompt], [UNSAID, *ticket.prompt_likely])
        return writing.waiting

    def _reused(self, end: End | None) -> int:
        return 0 if end is None or end.stats is None else end.stats.reused_tokens
