"""Drafts grown from predictions: a proposer, a tree policy and a length policy together."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.executable import Executable
from ....ir.plan import DraftRecord
from ...asking.options import GenerationOptions
from ..lengths.base import LengthPolicy
from ..proposers.base import PROPOSERS
from ..trees.base import TREES
from .base import DRAFTERS, NO_DRAFT, Draft, Drafter, UnverifiedStep, VerifiedStep


class GrownDrafter(Drafter):
    """Any proposer under any tree policy."""

    def __init__(
        self,
        record: DraftRecord,
        executable: Executable,
        options: GenerationOptions,
        length: LengthPolicy,
    ) -> None:
        super().__init__(record, executable, options)
        tree = executable.program.plan.tree
        self.proposer = PROPOSERS.find(record)(record, executable, options)
        self.tree = TREES.find(tree)(tree)
        self.tree.begin(options)
        self.length = length
        self.wants, self.reads = self.proposer.wants, self.proposer.reads

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """See `Drafter.begin`."""
        self.proposer.begin(prompts)

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        if max(rooms) < 1:
            return [NO_DRAFT] * len(rooms)
        drafts = self.tree.grow(self.proposer, rooms, self.length)
        return self.proposer.ride(drafts, rooms)

    def read(self, fed: UnverifiedStep) -> None:
        """See `Drafter.read`."""
        self.proposer.read(fed)

    def observe(self, taken: VerifiedStep) -> None:
        """See `Drafter.observe`."""
        self.proposer.observe(taken)


def drafter_for(
    record: DraftRecord,
    executable: Executable,
    options: GenerationOptions,
    length: LengthPolicy,
) -> Drafter:
    """The drafter that carries out a record, directly or through its proposer."""
    if PROPOSERS.has(record):
        return GrownDrafter(record, executable, options, length)
    kind = DRAFTERS.find(record)
    if issubclass(kind, Composed):
        return kind(record, executable, options, length)
    return kind(record, executable, options)


class Composed(Drafter):
    """A drafter made of others, which need the length policy too."""

    def __init__(
        self,
        record: DraftRecord,
        executable: Executable,
        options: GenerationOptions,
        length: LengthPolicy,
    ) -> None:
        super().__init__(record, executable, options)
        self.length = length
