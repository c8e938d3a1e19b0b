"""What a proposer is: something that predicts what may follow any node of a growing draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ...feeding.draft import Draft
from ...registry import Registry
from ..follower import Follower
from ..level import Ids, Level, repeated
from ..setting import Setting


class Proposer(Follower, ABC):
    """Predicts successors of draft nodes. A tree policy decides which of them become the draft.

    depth: levels it can predict, as its record says; None: any. Register a subclass with
    ``@PROPOSERS.register(ItsRecord)`` in its own file of this folder.
    """

    def __init__(self, record: Any, setting: Setting) -> None:
        self.record, self.executable, self.options = record, setting.executable, setting.options
        self.depth: int | None = record.levels or None

    @abstractmethod
    def root(self, count: int) -> Level:
        """What may follow each sequence's last token: M = 1, `count` candidates at most.

        Starts a new draft: nodes of the last one are forgotten.
        """

    @abstractmethod
    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """What may follow M nodes that the draft now has one level below the last.

        tokens: i64[B,M], the nodes' own. parents: i64[B,M], for each the index, in the previous
        call's M, of the node it follows (0 after `root`). A node without a token (-1) may get
        anything.
        """

    def ride(self, drafts: list[Draft], rooms: Sequence[int]) -> list[Draft]:
        """The drafts that were drawn, with riders where the proposer wants some (`Draft.riders`).

        rooms: levels that each sequence's draft might have; 0: the sequence wants none.
        """
        return drafts


class ByDepth(Proposer):
    """Predicts by depth alone: level `place` is the same for all nodes."""

    place = 0

    def root(self, count: int) -> Level:
        self.place = 0
        return self.level(count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        self.place += 1
        return repeated(self.level(count), parents)

    @abstractmethod
    def level(self, count: int) -> Level:
        """The candidates of `place`."""


class LayersProposer(Proposer):
    """Drafts with some of the target's own layers. Its caches hold the committed text.

    feeder: runs the target. texts: the generation's. below: levels of the draft so far.
    """

    below = 0

    def __init__(self, record: Any, setting: Setting) -> None:
        super().__init__(record, setting)
        assert setting.feeder is not None, "drafting with the target's layers needs its feeder"
        self.feeder, self.texts = setting.feeder, setting.texts

    def ends(self) -> tuple[list[int], list[int]]:
        """Row and position at which the draft's next level begins, by text; 0 for done ones."""
        past = [0 if text.done else text.rows + self.below for text in self.texts]
        starts = [0 if text.done else text.position + self.below for text in self.texts]
        return past, starts


PROPOSERS: Registry[Proposer] = Registry(__package__)
