"""Source records: what texts are written from, where that is more than their own beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from .base import Record, Returned, record
from .bounds import Axes, Context, Following, Nodes, Opening, Place, Width, Words

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan

HEARD = -1
"""In place of a language's token: which one it is has to be heard."""

EMBEDS = "embeds"
"""The state that holds a prompt's rows where a call gives these instead of tokens; and, behind a
dot, what reads them. Both are made when a program is compiled."""

STATES = "states"
"""The states of tokens that a step's head reads; and, behind a dot, the function that returns them
in the place of logits. It is made when a program is compiled."""

TRANSCRIBE = "transcribe"
"""The task that a language alone asks for."""


@dataclass(frozen=True)
class SourceRecord(Record):
    """Base of source records."""

    slot: ClassVar[str] = "source"
    noun: ClassVar[str] = "source"

    @property
    def encoder(self) -> str | None:
        """The function that reads the source; None where there is none."""
        return None

    @property
    def rows(self) -> int:
        """Rows that a source has at most."""
        return 0

    def beginning(self, prompt: Sequence[int]) -> Sequence[int]:
        """What the text begins with that is asked for with a prompt."""
        return prompt


@record
class NoSource(SourceRecord):
    """A text follows from what it begins with, and from nothing else."""

    kind: ClassVar[str] = "none"


@record
class Pictures(SourceRecord):
    """A text may hold pictures: rows that something else made, in the places of a token.

    token: what stands for a row of a picture in prompts. width: numbers of a row. most: rows that a
    text has at most. together: rows that follow each other without a token between them see each
    other, the later ones, too. axes: by which of its three places in time, height and width each
    angle of the rotary embedding turns a row, for models in which a picture's rows have places of
    their own; where there are none, rows stand as tokens do. merged: of a picture's patches, so
    many along each side are one row.
    """

    token: Place = 0
    width: Width = 1
    most: Context = 512
    together: bool = False
    axes: Axes = ()
    merged: Nodes = 1
    kind: ClassVar[str] = "pictures"
    state: ClassVar[str] = "pictures"
    """What holds a text's rows; made when a program is compiled."""
    blocks: ClassVar[str] = "pictures.blocks"
    """What holds which rows see each other, as equal numbers; made where some do."""
    places: ClassVar[str] = "pictures.places"
    """What holds the rows' places in time, height and width; made where they have some."""

    @staticmethod
    def function(name: str) -> str:
        """What reads prompts with pictures as the function `name` does texts; made then, too."""
        return f"{name}.pictures"

    @property
    def rows(self) -> int:
        return self.most


@record
class Encoded(SourceRecord):
    """Texts are written from a source, which `function` reads once, before the first step.

    It takes the source's ``tokens`` and ``positions``, or ``features``, and ``lengths``; what it
    makes of them lies in states that steps read. most: rows that a source has at most.
    vocabulary: ids of source tokens are below it; 0 where the source is none of tokens. start: the
    tokens that every text begins with, unless a call says others.

    Where the source is speech in many languages (whisper), more follows on the first of them, see
    `opening`. languages: their codes, and their names behind them; language_tokens: what stands for
    each. tasks, task_tokens: likewise. usual: what follows where a call says nothing, `HEARD` for
    the language that is heard. stays: whether that is a language and a task, each of which holds
    where a call says the other alone. untimed: the token that asks for no times, or none.
    """

    function: str = "encode"
    most: Context = 512
    vocabulary: Place = 0
    start: Opening = (0,)
    languages: Words = ()
    language_tokens: Following = ()
    tasks: Words = ()
    task_tokens: Following = ()
    usual: Following = ()
    stays: bool = False
    untimed: Following = ()
    kind: ClassVar[str] = "encoded"

    def check(self) -> None:
        for names, tokens in ("languages", "language_tokens"), ("tasks", "task_tokens"):
            if len(getattr(self, names)) != len(getattr(self, tokens)):
                raise InputError(f"{self.kind}: {names} and {tokens} must be as many")

    @property
    def encoder(self) -> str:
        return self.function

    @property
    def rows(self) -> int:
        return self.most

    def beginning(self, prompt: Sequence[int]) -> Sequence[int]:
        """See `SourceRecord.beginning`: the prompt is the source."""
        return self.start

    def hears(self, language: str | None, task: str | None) -> bool:
        """Whether the language has to be heard where a call says these."""
        if language is not None or not self.languages:
            return False
        known = self.stays or task is None
        return not (known and self.usual and self.usual[0] != HEARD)

    def opening(
        self, language: str | None = None, task: str | None = None, heard: str | None = None
    ) -> list[int]:
        """What a text begins with whose language and task these are; None: a call says nothing.

        As whisper was trained: the start, a language, a task, and that no times are asked for.
        heard: the language where no call says it. Errors: `InputError` for what the model does not
        know.

        >>> e = Encoded(start=(9,), languages=("en", "de"), language_tokens=(1, 2),
        ...             tasks=("transcribe",), task_tokens=(5,), untimed=(7,))
        >>> e.opening("de"), e.opening(heard="en")
        ([9, 2, 5, 7], [9, 1, 7])
        """
        tokens, first = list(self.start), len(self.start)
        if self.stays or (language is None and task is None):
            tokens += self.usual
        spoken = heard if language is None else language
        if spoken is not None:
            known = self.languages, self.language_tokens
            tokens[first : first + 1] = [_token("language", spoken, *known)]
        if task is None and language is not None and TRANSCRIBE in self.tasks and not self.stays:
            task = TRANSCRIBE
        if task is not None:
            tokens[first + 1 :] = [_token("task", task, self.tasks, self.task_tokens)]
        if self.untimed and tokens[-1] != self.untimed[0]:
            tokens.append(self.untimed[0])
        return [token for token in tokens if token != HEARD]

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, {}


def _token(what: str, said: str, names: Sequence[str], tokens: Sequence[int]) -> int:
    if said not in names:
        first = [name for at, name in enumerate(names) if tokens.index(tokens[at]) == at]
        known = ", ".join(first) or "none by name: give the tokens as decoder_input_ids"
        raise InputError(f"{what}={said!r}: the model knows {known}")
    return tokens[names.index(said)]
