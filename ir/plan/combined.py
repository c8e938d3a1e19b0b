"""Draft records made of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from .base import Returned, record
from .bounds import Filled, Nodes
from .draft import CachedDraft, DraftRecord, NoDraft

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan
    from .tree import TreeRecord


@record
class MergedDraft(DraftRecord):
    """One tree of the drafts of several drafters: what they agree on is verified once.

    of: the drafters, in order of preference: a later one gets what nodes the earlier ones leave.
    nodes: of the merged tree at most; None: all.
    """

    of: Filled[tuple[DraftRecord, ...]] = ()
    nodes: Nodes | None = None
    kind: ClassVar[str] = "merged"
    requires: ClassVar[frozenset[str]] = frozenset({"drafts", "trees"})
    provides: ClassVar[frozenset[str]] = frozenset()
    branches: ClassVar[bool] = True
    tells: ClassVar[bool] = False

    def at_most(self, tree: int | None) -> int:
        return sum(part.at_most(tree) for part in self.of) if self.nodes is None else self.nodes


@record
class StagedDraft(CachedDraft):
    """Another model drafts, and `drafter` drafts for it: it checks several guesses in one step.

    The draft is the same as without the inner drafter; making it takes fewer steps.
    """

    drafter: DraftRecord = field(default_factory=NoDraft)
    kind: ClassVar[str] = "staged"
    narrow: ClassVar[bool] = True
    unrolls: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *self.drafter.reads)

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: a `drafter` that knows only what follows committed text."""
        if not self.drafter.foresees:
            yield (
                f"draft={self.brief}: {self.drafter.brief} cannot draft for another drafter: it "
                f"knows only what follows committed text; drafters that copy can, such as suffix"
            )


@dataclass(frozen=True)
class WrappingDraft(DraftRecord):
    """Base of records that make the chains of another drafter, which they hold, in another way: a
    whole chain of best tokens at once, without their probabilities."""

    draft: DraftRecord = field(default_factory=CachedDraft)
    grows: ClassVar[bool] = True
    tells: ClassVar[bool] = False

    @property
    def core(self) -> DraftRecord:
        return self.draft

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: a tree that is no chain, a length that looks at each level."""
        what = f"draft={self.brief}"
        if not plan.tree.chain:
            yield f"{what} makes chains of best tokens, and the plan has tree={plan.tree.brief}"
        if plan.length.by_level:
            yield (
                f"{what} makes all levels of a draft at once, and length={plan.length.brief} looks "
                f"at each of them before the next is made"
            )


@record
class UnrolledDraft(WrappingDraft):
    """A chain whose levels one call of a function makes, each fed with the one before's best token.

    draft: the drafter whose chain it is; its function is what training trains. chain: takes what
    that takes, with ``select`` [B,1], and returns ``draft_tokens`` [B,levels,1].
    """

    draft: CachedDraft = field(default_factory=CachedDraft)
    chain: str = "draft.chain"
    kind: ClassVar[str] = "unrolled"

    def check(self) -> None:
        if not self.draft.unrolls:
            raise InputError(f"{self.draft.kind} has no chain that one call could make")

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.chain, {"draft_tokens": ("", self.levels, 1)}

    @property
    def unrolled(self) -> UnrolledDraft:
        return self

    @property
    def cached(self) -> tuple[str, ...]:
        return (*super().cached, self.chain)


@record
class FusedDraft(WrappingDraft):
    """The step itself makes the next chain (see `Fused`); `draft` makes it where not the argmax
    decides."""

    draft: UnrolledDraft = field(default_factory=UnrolledDraft)
    kind: ClassVar[str] = "fused"
    in_step: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`. Errors: `InputError` for a plan whose step makes no draft."""
        step, spare = plan.step.fed(argmax=True)
        if step == plan.step.plain or spare < self.levels - 1:
            raise InputError(
                f"{self.brief} is made by the step, and step={plan.step.brief}; expected "
                f"fused(...) with spare={self.levels - 1} at least"
            )
        yield step, {"drafted": ("", 1 + self.levels)}

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: records that make trees."""
        yield from super().misfits(plan)
        records: tuple[TreeRecord | DraftRecord, ...] = (plan.draft, *plan.draft.leaves, plan.tree)
        for part in records:
            if part.branches:
                yield (
                    f"the step drafts and takes every draft for a chain, but "
                    f"{part.slot}={part.brief} makes trees: leave fuse_draft out"
                )
