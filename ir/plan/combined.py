"""Draft records made of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .base import record
from .bounds import Nodes
from .draft import CachedDraft, DraftRecord, NoDraft


@record
@dataclass(frozen=True)
class MergedDraft(DraftRecord):
    """One tree of the drafts of several drafters: what they agree on is verified once.

    of: the drafters, in order of preference: a later one gets what nodes the earlier ones leave.
    nodes: of the merged tree at most; None: all.
    """

    of: tuple[DraftRecord, ...] = ()
    nodes: Nodes | None = None
    kind: ClassVar[str] = "merged"
    branches: ClassVar[bool] = True

    @property
    def tells(self) -> bool:
        """The union of several drafts is sampled from none of them."""
        return False

    @property
    def most(self) -> int | None:
        """`nodes`, or those of all parts; None if one follows the plan's tree."""
        sizes = [draft.most for draft in self.of]
        if self.nodes is not None:
            return self.nodes
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


@record
@dataclass(frozen=True)
class StagedDraft(CachedDraft):
    """Another model drafts, and `drafter` drafts for it: it checks several guesses in one step.

    The draft is the same as without the inner drafter; making it takes fewer steps.
    """

    drafter: DraftRecord = field(default_factory=NoDraft)
    kind: ClassVar[str] = "staged"
    narrow: ClassVar[bool] = True

    @property
    def reads(self) -> tuple[str, ...]:
        """What `drafter` reads, too."""
        return (*super().reads, *self.drafter.reads)


@record
@dataclass(frozen=True)
class UnrolledDraft(CachedDraft):
    """A chain whose levels one call of a function makes, each fed with the one before's best token.

    chain: takes what `function` takes, with ``select`` [B,1], and returns ``draft_tokens``
    [B,levels,1]. `function` itself is what training trains.
    """

    chain: str = "draft.chain"
    kind: ClassVar[str] = "unrolled"
    chains: ClassVar[bool] = True

    @property
    def tells(self) -> bool:
        """Chains of best tokens are sampled from nothing."""
        return False

    @property
    def cached(self) -> tuple[str, ...]:
        """`function` and `chain`."""
        return (self.function, self.chain)


@record
@dataclass(frozen=True)
class FusedDraft(UnrolledDraft):
    """The step itself makes the next chain (see `Fused`); `chain` drafts where not the argmax
    decides."""

    kind: ClassVar[str] = "fused"
    in_step: ClassVar[bool] = True
