"""Requests that come and go, decoded together by one executable.

One thread owns the executable. Before each step it ends what was cancelled or is late, gives free
slots to requests that wait, and feeds a piece of a prompt; then all slots that decode take one step
together::

    admit    waiting requests take free slots, the client with the fewest running ones first
    read     a piece of a prompt of at most `chunk` tokens, in its slot alone
    step     the slots' drafts -> one step over the slots from the first to the last that decodes
             -> each slot verifies its part, under its own options

Another executable of the same model takes the place of this one where no request runs: none enters
from then on until those that run are over (`Engine.renew`).

A request enters and leaves at a step's boundary (Yu et al., "Orca", OSDI 2022), and a long prompt
is cut so that others' steps do not wait for all of it (Agrawal et al., "SARATHI", 2023,
arXiv 2308.16369). A piece runs beside the step, not inside it: steps are rectangles of tokens, and
one long row would have all others computed at its width.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ir import InputError
from ...ir.execution.executable import Executable
from ...ir.support.memory import give_back
from ..asking.request import Request, read_request
from ..cache.base import CACHES
from ..cache.conversations import MOST
from ..feeding.draft import NO_DRAFT, Draft
from ..feeding.feed import Feeder
from ..feeding.outputs import Outputs
from ..rounds.general import step_feed
from .joined import JoinedDrafts
from .lengths import SharedLengths
from .sharing import shareable
from .slot import FREE, Slot
from .ticket import QueueFull, Reason, Ticket, Told

CHUNK = 64
"""Tokens of prompts between two steps, unless told otherwise."""

LEAST = 256
"""Tokens that a request may have at least."""

GIVE_BACK = 10.0
"""Seconds of work after which freed memory is given back to the system: pieces of prompts of all
lengths leave holes that the C library keeps, more of them the longer a server runs."""


@dataclass
class Figures:
    """What an engine does and did. running, waiting: requests now. ended: by `Reason`. rejected:
    for a full queue. prompt_tokens, new_tokens: of all requests; reused_tokens: of the prompts,
    those whose rows were there. draft_tokens, accepted_tokens: verified, and of those kept. steps:
    decode steps; sequence_steps: times the requests in them. busy: seconds with something to do.
    """

    running: int = 0
    waiting: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    rejected: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    reused_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    sequence_steps: int = 0
    busy: float = 0.0


class Engine:
    """See the module docstring.

    slots: requests that are decoded at once. queue: those that may wait besides. chunk: tokens of
    prompts between two steps. context: tokens that a request may have, prompt included; as many as
    the model's context, or as there is memory for. keep: bytes of copies of earlier texts, for
    prompts that begin so. heard: called by the engine's thread with each request that was answered;
    must return at once and raise nothing. The executable is the engine's until `close`.
    Errors: `UnsupportedError` for a plan whose steps cannot be shared.
    """

    def __init__(
        self,
        executable: Executable,
        *,
        slots: int = 8,
        queue: int = 64,
        chunk: int = CHUNK,
        context: int | None = None,
        keep: int = MOST,
        heard: Callable[[Ticket], None] | None = None,
    ) -> None:
        for name, number in (("slots", slots), ("queue", queue), ("chunk", chunk)):
            if number < 1:
                raise InputError(f"{name}: expected 1 or more, got {number}")
        self.queue, self.chunk, self.count, self.keep = queue, chunk, slots, keep
        self.figures, self.clock, self.heard = Figures(), time.monotonic, heard
        self._take(shareable(executable))
        self._renewed: Executable | None = None
        most = self.program.info.context
        if context is not None and context > most:
            raise InputError(f"context={context}: the model's context is {most} tokens")
        self.context = context or most
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._turns, self._given = 0, 0.0
        ready: list[Exception] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(ready,), name="graftwork-engine", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if ready:
            raise ready[0]

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing

    def read(self, ids: list[int], options: Mapping[str, Any]) -> Request:
        """What is asked for, checked. options: of `generate`. Errors: `InputError`."""
        prompt = torch.tensor([ids], dtype=torch.int64)
        # There is no padding, and a checkpoint that asks for beams gets none here.
        keywords = {"attention_mask": torch.ones_like(prompt), "num_beams": 1, **options}
        request = read_request(prompt, keywords, self.program)
        if request.options.beams:
            raise InputError("num_beams: a request here is one text; give num_beams=1")
        if request.search is not None:
            raise InputError(
                "num_return_sequences: a request here is one text; ask for the others besides, or "
                "use Model.generate"
            )
        (text,) = request.texts
        if text.limit > self.context:
            raise InputError(
                f"{text.prompt} prompt tokens + {text.limit - text.prompt} new tokens exceed the "
                f"{self.context} tokens that a request may have here"
            )
        return request

    def submit(
        self,
        request: Request,
        told: Told,
        *,
        client: str = "",
        seconds: float | None = None,
        likeliest: int = 0,
        scored: bool = False,
        pooling: str = "",
    ) -> Ticket:
        """Queue a request of `read`, from any thread. seconds: until it is ended as late.
        likeliest, scored, pooling: see `Ticket`. Errors: `QueueFull`; `InputError` once the engine
        is closed; for `scored` and `pooling` those of programs that cannot."""
        if scored and self.program.plan.step.ahead:
            raise InputError(
                "echo with logprobs: this recipe's prompts run through some of the layers, and "
                "their tokens have no logits: leave one out, or serve another recipe"
            )
        deadline = None if seconds is None else self.clock() + seconds
        ticket = Ticket(
            request,
            told,
            client,
            deadline,
            likeliest,
            scored=scored,
            pooling=pooling,
            _wake=self._wake,
        )
        with self._changed:
            if self._closing:
                raise InputError("the engine is closed: it takes no more requests")
            free = self.count - self.figures.running
            if len(self._waiting) >= self.queue + free:
                self.figures.rejected += 1
                raise QueueFull(len(self._waiting))
            self._waiting.append(ticket)
            self.figures.waiting = len(self._waiting)
            self._changed.notify()
        return ticket

    def renew(self, executable: Executable) -> None:
        """Decode with another executable of the same model, say one with a better drafter, from
        when no request runs on; from any thread. Errors: `UnsupportedError` as for the first."""
        executable = shareable(executable)
        with self._changed:
            self._renewed = executable
            self._changed.notify()

    def close(self) -> None:
        """End all requests, and give the executable back."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # -- the engine's thread

    @torch.no_grad()
    def _work(self, ready: list[Exception]) -> None:
        while not self._closing:
            with self.executable.turn:
                try:
                    self._open()
                except Exception as error:
                    ready.append(error)
                    self._closing = True
                finally:
                    self._ready.set()
                while self._wait():
                    begun = self.clock()
                    self._turn()
                    self.figures.busy += self.clock() - begun
                    if self.figures.busy - self._given >= GIVE_BACK:
                        self._given = self.figures.busy
                        give_back()
                for slot in self._taken():  # none where another executable comes
                    self._end(slot, Reason.CLOSED)
            with self._changed:
                renewed, self._renewed = self._renewed, None
            if renewed is not None:
                self._take(renewed)
        while ticket := self._next():
            self._over(ticket, Reason.CLOSED, ready[0] if ready else None)

    def _take(self, executable: Executable) -> None:
        """Decode with an executable from now on."""
        self.executable, self.program = executable, executable.program
        cache = CACHES.find(self.program.plan.cache)(self.program.plan.cache, executable)
        # Filler would write over rows of blocks, and change what recurrences hold.
        self.alone = cache.most is not None or self.program.recurrent
        self.lengths, self.drafts = SharedLengths(executable), JoinedDrafts(executable)
        self._feeders: dict[tuple[int, int], Feeder] = {}
        self.slots: list[Slot] = []

    def _open(self) -> None:
        """Begin all sequences, with room for as long texts as there is memory for."""
        while True:
            try:
                self.executable.begin(self.count, self.context + self.program.plan.columns + 1)
                break
            except InputError:
                if self.context < 2 * LEAST:
                    raise
                self.context //= 2
        self.slots = [Slot(self.executable, n, keeps=not self.alone) for n in range(self.count)]
        for slot in self.slots:
            slot.kept.most = self.keep

    def _wait(self) -> bool:
        """Until there is something to do with this executable; False: there is none any more."""

        def called() -> bool:
            return bool(self._closing or self._renewed or self._waiting or self._taken())

        with self._changed:
            self._changed.wait_for(called)
            return not self._closing and (self._renewed is None or bool(self._taken()))

    def _turn(self) -> None:
        """Requests come and go, a piece of a prompt, and a step."""
        self._drop()
        self._admit()
        self._read()
        live = [slot for slot in self.slots if slot.decodes]
        if not live:
            return
        try:
            self._step(live)
        except Exception as error:  # what failed is every request's of the step
            for slot in live:
                if slot.ticket is not None:
                    self._end(slot, Reason.ERROR, error)

    def _taken(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.ticket is not None]

    def _drop(self) -> None:
        """End requests that nobody waits for, and those that are late."""
        for slot in self._taken():
            if slot.ticket is not None and (reason := self._due(slot.ticket)):
                self._end(slot, reason)
        with self._changed:
            due = [(t, why) for t in self._waiting if (why := self._due(t))]
            for ticket, _ in due:
                self._waiting.remove(ticket)
            self.figures.waiting = len(self._waiting)
        for ticket, why in due:
            self._over(ticket, why)

    def _due(self, ticket: Ticket) -> Reason | None:
        if ticket.cancelled:
            return Reason.CANCELLED
        late = ticket.deadline is not None and self.clock() >= ticket.deadline
        return Reason.TIMEOUT if late else None

    def _next(self) -> Ticket | None:
        """The request that has waited longest among those of clients with the fewest slots."""
        runs = Counter(slot.ticket.client for slot in self.slots if slot.ticket is not None)
        with self._changed:
            if not self._waiting:
                return None
            ticket = min(self._waiting, key=lambda one: runs[one.client])  # the first of the least
            self._waiting.remove(ticket)
            self.figures.waiting = len(self._waiting)
        return ticket

    def _admit(self) -> None:
        """Give free slots to waiting requests."""
        while free := [slot for slot in self.slots if slot.ticket is None]:
            # Those that run are the last ones of an executable that is replaced.
            ticket = self._next() if self._renewed is None else None
            if ticket is None:
                return
            slot = self._place(ticket, free)
            self._turns += 1
            slot.used = self._turns
            try:
                slot.begin(ticket, self.lengths)
            except Exception as error:
                slot.release()
                self._over(ticket, Reason.ERROR, error)
            self.figures.running = len(self._taken())

    def _place(self, ticket: Ticket, free: list[Slot]) -> Slot:
        """The free slot whose rows go furthest; else the nearest to those in use, as steps cover
        all between; else the one that was used longest ago."""
        taken = [slot.index for slot in self._taken()]

        def cost(slot: Slot) -> tuple[int, int, int]:
            span = [*taken, slot.index]
            return -slot.shares(ticket.text.tokens), max(span) - min(span), slot.used

        return min(free, key=cost)

    def _read(self) -> None:
        """Feed pieces of prompts: as many tokens as there is time for between two steps, or, where
        nothing is decoded, the whole next piece."""
        budget = self.chunk
        while reading := [slot for slot in self.slots if slot.reads]:
            slot = min(reading, key=lambda one: one.used)
            bound = any(slot.decodes for slot in self.slots) and not self.alone
            if bound and budget < 1:
                return
            try:
                # Logits of all of a piece's tokens take memory.
                whole = self.chunk if slot.ticket is not None and slot.ticket.scored else None
                budget -= slot.read(budget if bound else whole)
            except Exception as error:
                self._end(slot, Reason.ERROR, error)
                continue
            if slot.decodes:
                self._tell(slot)
            elif not bound and not self.alone:
                return

    def _step(self, live: list[Slot]) -> None:
        """One step of all slots that decode."""
        first, feeder = self._feeder(live)
        slots = self.slots[first : first + feeder.batch]
        rooms = [slot.decoding.texts[0].room for slot in live]
        self.lengths.decide(list(zip((s.decoding.length for s in live), rooms, strict=True)))
        drafts = self.drafts.make(slots, self._drafted)  # settles rows, therefore first
        if not (live := [slot for slot in live if slot.decodes]):
            return
        texts = [slot.decoding.texts[0] if slot.decodes else FREE for slot in slots]
        past = [slot.rows for slot in slots]  # rows of a slot that takes no part stay
        fetch = tuple(sorted({name for slot in live for name in slot.decoding.fetch}))
        fitted, feed = step_feed(feeder, texts, drafts, past, fetch)
        feeder.folded = [0] * feeder.batch  # of other texts, which may have been longer
        before, begun = feeder.seconds, time.perf_counter() - feeder.executable.preparing
        outputs = feeder.run(feed)
        self.figures.steps += 1
        self.figures.sequence_steps += len(live)
        for place, slot in enumerate(slots):
            if not slot.decodes:
                continue
            own = Outputs({name: value[place : place + 1] for name, value in outputs.items()})
            try:
                slot.take(fitted[place], feed.rows[place], own, feeder.seconds - before)
            except Exception as error:  # this request's options, logits or drafter
                self._end(slot, Reason.ERROR, error)
        took = time.perf_counter() - feeder.executable.preparing - begun
        came = [(s.decoding.length, s.taken) for s in live if s.ticket is not None and s.taken]
        if len(came) == len(live):
            self.lengths.observe(came, sum(slot.drafting for slot in live), took)
        for slot in live:
            if slot.ticket is not None:
                self._tell(slot)

    def _drafted(self, slot: Slot) -> Draft:
        """A slot's draft for the next step. A request that fails is over."""
        try:
            return slot.propose()[0] if slot.decodes else NO_DRAFT
        except Exception as error:
            self._end(slot, Reason.ERROR, error)
            return NO_DRAFT

    def _feeder(self, live: list[Slot]) -> tuple[int, Feeder]:
        """The first slot of a step, and what feeds the sequences from there to the last."""
        first, last = live[0].index, live[-1].index
        count = last - first + 1
        function, spare = self.program.plan.step.fed(True)
        if self.executable.widths(function).each:  # compiled for their sizes: few of them
            count = min(1 << (count - 1).bit_length(), self.count)
            first = min(first, self.count - count)
        found = self._feeders.get((first, count))
        if found is None:
            part = self.executable.sequences(first, count)
            step = self.program.plan.step
            # Where a draft's tokens left is each text's own: a step here begins with the first.
            parts = () if step.in_parts else step.parts
            found = self._feeders[first, count] = Feeder(part, count, function, spare, parts)
            found.rows = self.executable.limit
        return first, found

    def _tell(self, slot: Slot) -> None:
        """Hand on a slot's new tokens, and free it if its text is done."""
        assert slot.ticket is not None
        if slot.ticket.text.done:
            self._end(slot, slot.reason())
        else:
            slot.ticket.tell()

    def _end(self, slot: Slot, reason: Reason, error: Exception | None = None) -> None:
        """A request is over: its slot is free."""
        ticket, stats = slot.ticket, slot.stats
        assert ticket is not None
        slot.release()
        figures = self.figures
        figures.running = len(self._taken())
        figures.reused_tokens += stats.reused_tokens
        figures.draft_tokens += stats.draft_tokens
        figures.accepted_tokens += stats.accepted_tokens
        stats.new_tokens = ticket.text.generated
        self._over(ticket, reason, error, stats)
        if self.heard is not None and reason in (Reason.STOP, Reason.LENGTH):
            self.heard(ticket)

    def _over(
        self, ticket: Ticket, reason: Reason, error: Exception | None = None, stats: Any = None
    ) -> None:
        self.figures.ended[reason] += 1
        self.figures.prompt_tokens += ticket.text.prompt if stats is not None else 0
        self.figures.new_tokens += ticket.text.generated
        ticket.ended(reason, stats, error)
