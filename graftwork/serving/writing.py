"""One answer while it is generated: tokens come, text, calls of tools and probabilities go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..chat.text_stream import TextStream
from ..chat.tool_calls import CallDelta, ToolFormat, ToolStream
from ..runtime.serving.ticket import Likely

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Chance(NamedTuple):
    """A token of the text, the character where it begins, and what the model made of it."""

    id: int
    place: int
    likely: Likely


UNSAID = Likely(math.nan, [], [])
"""Of a text's first token, which follows from nothing."""


class Piece(NamedTuple):
    """New text of a choice, by its number. calls: parts of calls of tools. chances: of its tokens,
    where they are asked for. finish: why it ended; None: it goes on."""

    choice: int
    text: str
    finish: str | None = None
    calls: Sequence[CallDelta] = ()
    chances: Sequence[Chance] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.text or self.calls or self.chances or self.finish is not None)


class Writing:
    """See the module docstring. stops, ends: of `TextStream`. form: of calls, if there may be any;
    single: one at most. whole: a token that ends it has its probability told, too."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str],
        ends: Iterable[int],
        form: ToolFormat | None = None,
        *,
        single: bool = False,
        whole: bool = False,
    ) -> None:
        self.whole = whole
        self.ends = frozenset(ends)
        marks = [] if form is None else [form.begin]
        self.stream = TextStream(tokenizer, stops, self.ends, marks)
        self.tools = None if form is None else ToolStream(form, single=single)
        self.shown, self.waiting = 0, list[Chance]()
        self.total, self.count = 0.0, 0

    @property
    def done(self) -> bool:
        """Whether nothing more is wanted: a text stopped it, or a call was all."""
        return self.stream.stopped or (self.tools is not None and self.tools.done)

    @property
    def mean(self) -> float:
        """Of its tokens' log probabilities."""
        return self.total / max(self.count, 1)

    def put(self, new: Sequence[int], likely: Sequence[Likely]) -> tuple[str, list[CallDelta]]:
        """Take new tokens; text and parts of calls."""
        if not likely:
            return self._told(self.stream.put(new))
        text = ""
        for token, one in zip(new, likely, strict=True):
            # A token is told with its text, or never: of a text that stops, nothing is shown.
            if self.whole or token not in self.ends:
                place = self.shown + len(self.stream.held)
                self.waiting.append(Chance(token, place, one))
            self.total, self.count = self.total + one.logprob, self.count + 1
            more = self.stream.put([token])
            text, self.shown = text + more, self.shown + len(more)
            if self.stream.stopped:
                break
        return self._told(text)

    def end(self) -> tuple[str, list[CallDelta]]:
        """What is left."""
        text = "" if self.done else self.stream.end()
        self.shown += len(text)
        said, calls = self._told(text)
        return said + ("" if self.tools is None else self.tools.end()), calls

    def finish(self, reason: str) -> str:
        """Why it ended, as OpenAI says it. reason: the engine's."""
        called = self.tools is not None and self.tools.count > 0
        stopped = self.done or reason == "stop"
        return "tool_calls" if called and stopped else "stop" if stopped else reason

    def chances(self, *, ended: bool = False) -> list[Chance]:
        """Of tokens whose text was shown since the last call, and, once it has ended, of the one
        that ended it."""
        found = [one for one in self.waiting if one.place < self.shown]
        self.waiting = self.waiting[len(found) :]
        if ended and self.whole:
            found += [one for one in self.waiting if one.id in self.ends]
        return found

    def _told(self, text: str) -> tuple[str, list[CallDelta]]:
        return (text, []) if self.tools is None else self.tools.put(text)
