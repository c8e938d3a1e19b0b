"""Draft records that need no second model: guesses iterated beside the text, and input copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Returned, Size, policy, record
from .bounds import Filled, Levels, Ngram, Nodes, Place
from .draft import DraftRecord

if TYPE_CHECKING:
    from .decode import DecodePlan


@dataclass(frozen=True)
class GuessDraft(DraftRecord):
    """Base of drafts that the step's ``argmax`` (pass add_argmax) corrects at every place."""

    reads: ClassVar[tuple[str, ...]] = ("argmax",)
    always: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`."""
        yield plan.step.plain, {"argmax": ("", "")}


@policy
@dataclass(frozen=True)
class JacobiDraft(GuessDraft):
    """A block of guesses that every step replaces by what the target says after each of them.

    Jacobi decoding (Santilli et al. 2023). tokens: of the block. Needs the step's ``argmax`` (pass
    add_argmax), which is the next guess.
    """

    tokens: Nodes = 10
    kind: ClassVar[str] = "jacobi"
    requires: ClassVar[frozenset[str]] = frozenset({"argmax", "cached"})


@policy
@dataclass(frozen=True)
class LookaheadDraft(GuessDraft):
    """N-grams that the target itself came up with in a window of guesses ahead.

    Lookahead decoding (Fu et al. 2024): guesses and n-grams to verify share a step as branches of
    one tree. window: places ahead that are guessed. ngram: tokens of an n-gram, the one it is found
    by included. pool: n-grams kept and verified for each first token. Needs the step's ``argmax``
    (pass add_argmax).
    """

    window: Nodes = 7
    ngram: Ngram = 5
    pool: Nodes = 7
    kind: ClassVar[str] = "lookahead"
    requires: ClassVar[frozenset[str]] = frozenset({"argmax", "cached", "trees"})
    branches: ClassVar[bool] = True

    @property
    def most(self) -> int:
        """Nodes of the n-grams verified and of the window, or of a window that is being filled."""
        levels = self.ngram - 1
        filling = [(1 + row) * (self.window + levels - 1 - row) - 1 for row in range(levels - 1)]
        return max((self.pool + self.window) * levels - 1, *filling, 0)


@policy
@dataclass(frozen=True)
class InputDraft(DraftRecord):
    """Copy the prompt from where the text stands in it: for editing.

    Aggressive decoding (Ge et al. 2022). tokens: draft tokens a step at most. start: the prompt's
    token that the text is expected to begin with. longest: tokens that must agree, at best, to find
    the place again after an edit.
    """

    tokens: Nodes = 20
    start: Place = 0
    longest: Levels = 4
    kind: ClassVar[str] = "input"
    brings: ClassVar[str] = "an input text"
    repeatable: ClassVar[bool] = True


@record
@dataclass(frozen=True)
class CorpusDraft(DraftRecord):
    """Copy what followed the longest match of the text in a corpus or in the text itself (SAM).

    weight: i64[N] of the program, the corpus; -1 ends a document. tokens: draft tokens a step at
    most. shortest: tokens that must match.
    """

    weight: Filled[str] = "corpus"
    tokens: Nodes = 16
    shortest: Levels = 2
    kind: ClassVar[str] = "corpus"
    foresees: ClassVar[bool] = True

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        """See `Record.looks_up`."""
        yield self.weight, True, ("",)
