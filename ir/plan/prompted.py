"""Draft records of trained prompt tokens: behind a step's own, or in a draft's call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Size, record
from .bounds import Filled, Part, Place, Share
from .draft import CachedDraft

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class OneCallDraft(CachedDraft):
    """Base of drafters with a cache that predict all `levels` in one call, by mask tokens.

    token: the id of a mask. weight: f[1,H], the trained embedding of the id, which then is the
    vocabulary's size; None: the id is a token that the function knows anyway.
    """

    token: Place = 0
    weight: Filled[str | None] = None
    stepwise: ClassVar[bool] = False
    unrolls: ClassVar[None] = None

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        """See `Record.looks_up`."""
        if self.weight:
            yield self.weight, False, (1, "")


@record
@dataclass(frozen=True)
class ParallelDraft(OneCallDraft):
    """A drafter that reads mask tokens as it reads text (PARD, P-EAGLE).

    Behind the text's last token the function is fed the id `token` levels - 1 times, for tokens
    that nobody knows yet: what it says after the k-th of them is about the place k further on.
    Their rows are forgotten; where it takes ``hidden``, it looks past what stands beside them.
    keep: in training, the part of a level's places that the next one has, too. least: the part of
    all places that every level has.
    """

    keep: Part = 0.7
    least: Share = 0.2
    kind: ClassVar[str] = "parallel"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical", "drafts"})
    provides: ClassVar[frozenset[str]] = frozenset()

    @property
    def masks(self) -> int:
        """Tokens behind the last one."""
        return self.levels - 1


@record
@dataclass(frozen=True)
class BlockDraft(OneCallDraft):
    """Layers over a cache of the target's features that predict a block (DFlash).

    The function is fed the text's last token and the id `token` once for each of the `levels` that
    it drafts, which all see each other; what it says after the k-th is about that very place. Their
    rows are forgotten. Rows of the text are made of ``hidden`` alone, beside the id `blank`.
    anchors: in training, the part of a text's places at which a block begins.
    """

    blank: Filled[Place] = 0
    anchors: Part = 0.2
    kind: ClassVar[str] = "block"

    @property
    def mutual(self) -> tuple[str, ...]:
        """`function`."""
        return (self.function,)
