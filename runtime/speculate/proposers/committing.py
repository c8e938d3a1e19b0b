"""Proposers with rows of the committed text, in a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence

from ...feeding.draft import UnverifiedStep, VerifiedStep
from ...memo import Memo
from ..committed import CommittedRows
from .base import Proposer


class CommittingProposer(Proposer):
    """Base of proposers that hand what becomes of texts on to their `CommittedRows`.

    committed: the rows; a subclass makes them.
    """

    reads = True
    committed: CommittedRows

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is cached of the new sequences."""
        self.committed.begin(prompts)

    def read(self, fed: UnverifiedStep) -> None:
        """Make the rows of a piece of the prompts."""
        self.committed.read(fed)

    def observe(self, taken: VerifiedStep) -> None:
        """Take what the target made of the accepted tokens."""
        self.committed.observe(taken)

    def keep(self, index: int, fed: int) -> Memo:
        return self.committed.keep(index, fed)

    def reach(self, memo: Memo, count: int) -> int:
        return self.committed.reach(memo, count)

    def resume(self, index: int, memo: Memo, count: int) -> None:
        self.committed.resume(index, memo, count)
