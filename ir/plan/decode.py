"""The decode plan: a record for each part of a generation loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from .cache import CacheRecord, KeepAll
from .depth import DepthRecord, FullDepth
from .draft import DraftRecord, NoDraft
from .length import FixedLength, LengthRecord
from .sizes import sizes_up_to
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
