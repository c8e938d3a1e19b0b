"""What the parts of drafting are told of a generation's texts."""

from __future__ import annotations

from collections.abc import Sequence

from ..feeding.draft import UnverifiedStep, VerifiedStep
from ..memo import Memo, Resumes


class Follower(Resumes):
    """A part that follows texts from their prompts on.

    wants: outputs of the step function that `read` and `observe` need. follower: the part that all
    of it is handed on to where a method is not overridden; None: nothing is done with it.
    """

    wants: tuple[str, ...] = ()
    follower: Follower | None = None

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """New sequences, one prompt each."""
        if self.follower is not None:
            self.follower.begin(prompts)

    def read(self, fed: UnverifiedStep) -> None:
        if self.follower is not None:
            self.follower.read(fed)

    def observe(self, taken: VerifiedStep) -> None:
        """After each verification; the last piece of the prompts counts as a step."""
        if self.follower is not None:
            self.follower.observe(taken)

    def bring_up(self, usual: int) -> bool:
        """Before a draft: make what texts lack where that is more than the `usual` tokens that a
        step with a draft leaves at most; whether it was. The draft makes the rest."""
        return self.follower is not None and self.follower.bring_up(usual)

    def keep(self, index: int, fed: int) -> Memo:
        return {} if self.follower is None else self.follower.keep(index, fed)

    def reach(self, memo: Memo, count: int) -> int:
        """See `Resumes.reach`. Who reads, and says nothing else, sees texts from their start."""
        if self.follower is not None:
            return self.follower.reach(memo, count)
        return 0 if self.reads else count

    def resume(self, index: int, memo: Memo, count: int) -> None:
        if self.follower is not None:
            self.follower.resume(index, memo, count)
