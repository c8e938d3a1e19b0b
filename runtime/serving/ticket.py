"""A request in the engine: what it asks for, who waits for it, and how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Event
from typing import NamedTuple

import torch

from ...ir.support.errors import InputError
from ..asking.request import Request
from ..asking.text import Text
from ..feeding.draft import UnverifiedStep
from ..stats import Stats


class Reason(StrEnum):
    """Why a request ended: an end token or stop sequence, its length, its client, its deadline, an
    error, or the end of the engine."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"
    CLOSED = "closed"


@dataclass(frozen=True)
class End:
    """reason: see `Reason`. prompt, new: tokens. stats: of its own decoding; None if it never ran.
    error: what went wrong."""

    reason: Reason
    prompt: int
    new: int
    stats: Stats | None = None
    error: Exception | None = None


class QueueFull(InputError):
    """No more requests may wait. waiting: how many do."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait already, as many as may; try again later")
        self.waiting = waiting


class Likely(NamedTuple):
    """What the model made of a place in the text, before options change its logits. logprob: of the
    token that stands there. ids, logprobs: of the likeliest tokens, best first."""

    logprob: float
    ids: list[int]
    logprobs: list[float]


Told = Callable[[list[int], End | None], None]
"""Called by the engine's thread with new tokens, and with the end once it is there. Must return at
once and raise nothing."""


@dataclass(eq=False)
class Ticket:
    """request: of one text. told: see `Told`. client: requests of one share its turns. deadline: of
    the engine's clock; None: none. likeliest: how many of the likeliest tokens `likely` has of each
    place, where the request asks for logits; it gets those of new tokens before `told` is called,
    which takes them out. scored: whether `prompt_likely` is to have the same of each token of the
    prompt but the first. pooling: the text is not continued: `states` f32[H] gets those of its
    tokens, pooled so. foreseen: the new tokens that were drafted and accepted, counted from 0."""

    request: Request
    told: Told
    client: str = ""
    deadline: float | None = None
    likeliest: int = 0
    sent: int = 0
    likely: deque[Likely] = field(default_factory=deque)
    scored: bool = False
    prompt_likely: list[Likely] = field(default_factory=list)
    pooling: str = ""
    states: torch.Tensor | None = None
    foreseen: list[int] = field(default_factory=list)
    _cancelled: Event = field(default_factory=Event)
    _wake: Callable[[], None] = lambda: None

    @property
    def text(self) -> Text:
        """The text, which grows."""
        return self.request.texts[0]

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop at the next step; from any thread, more than once if need be."""
        self._cancelled.set()
        self._wake()

    def tell(self, end: End | None = None) -> None:
        """Hand on the tokens that are new."""
        text = self.text
        new = text.tokens[text.prompt + self.sent :]
        self.sent += len(new)
        self.likely += _likely(text.logits, new, self.likeliest)
        text.logits.clear()  # a vocabulary each
        if new or end is not None:
            self.told(new, end)

    def hear(self, fed: UnverifiedStep) -> None:
        """A piece of the prompt was fed; its logits say what each token made of the next one."""
        prompt, start, count = self.text.tokens[: self.text.prompt], fed.starts[0], len(fed.rows[0])
        said = prompt[start + 1 : start + 1 + count]
        rows = fed.outputs["logits"][0, : len(said)].float().cpu()
        self.prompt_likely += _likely(list(rows), said, self.likeliest)

    def ended(
        self, reason: Reason, stats: Stats | None = None, error: Exception | None = None
    ) -> None:
        """Hand on the rest, and the end."""
        text = self.text
        self.tell(End(reason, text.prompt, text.generated, stats, error))


def _likely(logits: Sequence[torch.Tensor], tokens: Sequence[int], most: int) -> Iterator[Likely]:
    """logits: f32[V], what each token was chosen by; none where nobody wants them."""
    for row, token in zip(logits, tokens, strict=False):
        logprobs = row.log_softmax(-1)
        best = logprobs.topk(min(most, len(logprobs)))
        yield Likely(float(logprobs[token]), best.indices.tolist(), best.values.tolist())
