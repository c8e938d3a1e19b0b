"""The decode plan: a record for each part of a generation loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .base import untrained
from .cache import CacheRecord, KeepAll
from .depth import DepthRecord, FullDepth
from .draft import DraftRecord, NoDraft
from .length import FixedLength, LengthRecord
from .source import NoSource, SourceRecord
from .step import StepRecord, Whole
from .tree import Chain, TreeRecord
from .verify import Lossless, VerifyRecord


@dataclass(frozen=True)
class DecodePlan:
    """What texts are written from, what a step runs, and drafter, tree, length, verification, depth
    and cache policies."""

    source: SourceRecord = field(default_factory=NoSource)
    step: StepRecord = field(default_factory=Whole)
    draft: DraftRecord = field(default_factory=NoDraft)
    tree: TreeRecord = field(default_factory=Chain)
    length: LengthRecord = field(default_factory=FixedLength)
    verify: VerifyRecord = field(default_factory=Lossless)
    depth: DepthRecord = field(default_factory=FullDepth)
    cache: CacheRecord = field(default_factory=KeepAll)

    @property
    def speculates(self) -> bool:
        """Whether anything drafts."""
        return self.draft != NoDraft()

    @property
    def untaught(self) -> bool:
        """Whether nothing is drafted as it stands: no drafter knows anything, and the length gives
        up drafts that do not pay. Whoever trains one changes that."""
        knows = not all(untrained([leaf]) for leaf in self.draft.leaves)
        return self.speculates and self.length.gives_up and not knows

    @property
    def coupled(self) -> bool:
        """Whether sampled drafts are drawn by the noise that draws the text, which then does not
        depend on them."""
        told = any(leaf.samples for leaf in self.draft.leaves)
        return not (self.tree.samples or self.verify.told or told)

    def undrafted(self) -> DecodePlan:
        """The plan without drafts and with lossless verification: the target alone."""
        return replace(self, draft=NoDraft(), tree=Chain(), length=FixedLength(), verify=Lossless())

    @property
    def most(self) -> int:
        """Draft tokens that a step verifies at most.

        Every drafter's own limit counts, and the tree's where a drafter follows it.
        """
        return self.draft.at_most(self.tree.most)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that steps often have: without a draft, with one drafter's, with all of them."""
        sizes = self.draft.sizes(self.tree.most)
        drafted = (1 + size + self.draft.riders(size) for size in sizes)
        return tuple(sorted({1, *drafted, *self.cache.widths, *self.depth.widths}))

    @property
    def between(self) -> tuple[int, ...]:
        """Columns that steps have between those of `widths`: where drafts may end early, and where
        deeper layers are called before as many tokens lack them as may."""
        cut = sizes_up_to(self.most) if self.length.shortens else ()
        shorter = {1 + size + self.draft.riders(size) for size in cut}
        sooner = {1 + size for width in self.depth.widths for size in sizes_up_to(width - 1)}
        return tuple(sorted(shorter | sooner))

    @property
    def columns(self) -> int:
        """Tokens that a step is fed at most beside the last committed one: drafts and riders."""
        return self.most + self.draft.riders(self.most)


def sizes_up_to(most: int) -> tuple[int, ...]:
    """A few sizes for what may have any from 1 to `most`, so that the next of them is never by more
    than a third of itself too large: powers of two, from 4 on what lies half-way between them, and
    `most`.

    >>> sizes_up_to(16)
    (1, 2, 4, 6, 8, 12, 16)
    >>> sizes_up_to(7)
    (1, 2, 4, 6, 7)
    """
    found, size = {most} if most else set(), 1
    while size < most:
        found.add(size)
        if size >= 4 and 3 * size // 2 < most:
            found.add(3 * size // 2)
        size *= 2
    return tuple(sorted(found))
