"""Drafts grown from predictions: a proposer, a tree policy and a length policy together."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.plan import DraftRecord
from ...feeding.draft import NO_DRAFT, Draft
from ..noise import DraftNoise
from ..proposers.base import PROPOSERS
from ..setting import Setting
from ..trees.base import TREES
from .base import DRAFTERS, Drafter


class GrownDrafter(Drafter):
    """Any proposer under any tree policy."""

    def __init__(self, record: DraftRecord, setting: Setting) -> None:
        super().__init__(record, setting)
        tree = self.executable.program.plan.tree
        self.proposer = self.follower = PROPOSERS.find(record)(record, setting)
        noise = None if setting.noise is None else DraftNoise(setting.noise, setting.texts)
        self.tree, self.length = TREES.find(tree)(tree, self.options), setting.length
        self.tree.noise = noise
        self.wants, self.reads = self.proposer.wants, self.proposer.reads

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        if max(rooms) < 1:
            return [NO_DRAFT] * len(rooms)
        drafts = self.tree.grow(self.proposer, rooms, self.length)
        return self.proposer.ride(drafts, rooms)


def drafter_for(record: DraftRecord, setting: Setting) -> Drafter:
    """The drafter that carries out a record, directly or through its proposer."""
    grown = PROPOSERS.has(record) or (record.grows and not DRAFTERS.has(record))
    kind = GrownDrafter if grown else DRAFTERS.find(record)
    return kind(record, setting)
