"""Source records: what texts are written from, where that is more than their own beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Record, Returned, record
from .bounds import Axes, Context, Nodes, Opening, Place, Width

if TYPE_CHECKING:
    from .decode import DecodePlan


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
@dataclass(frozen=True)
class NoSource(SourceRecord):
    """A text follows from what it begins with, and from nothing else."""

    kind: ClassVar[str] = "none"


@record
@dataclass(frozen=True)
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
        """See `SourceRecord.rows`."""
        return self.most


@record
@dataclass(frozen=True)
class Encoded(SourceRecord):
    """Texts are written from a source, which `function` reads once, before the first step.

    It takes the source's ``tokens`` and ``positions``, or ``features``, and ``lengths``; what it
    makes of them lies in states that steps read. most: rows that a source has at most.
    vocabulary: ids of source tokens are below it; 0 where the source is none of tokens. start: the
    tokens that every text begins with, unless a call says others.
    """

    function: str = "encode"
    most: Context = 512
    vocabulary: Place = 0
    start: Opening = (0,)
    kind: ClassVar[str] = "encoded"

    @property
    def encoder(self) -> str:
        """See `SourceRecord.encoder`."""
        return self.function

    @property
    def rows(self) -> int:
        """See `SourceRecord.rows`."""
        return self.most

    def beginning(self, prompt: Sequence[int]) -> Sequence[int]:
        """See `SourceRecord.beginning`: the prompt is the source."""
        return self.start

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`."""
        yield self.function, {}
