"""The decode plan: how a program's functions become a generation loop, as data.

Each record is frozen and typed; a pass replaces records, the runtime looks up the class that
carries one out, the text form prints ``kind(field=value)``.

    >>> str(DecodePlan(draft=SuffixDraft(tokens=6)).draft)
    'suffix(tokens=6, longest=16, shortest=2)'
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .base import RECORDS, Record, record
from .combined import FusedDraft, MergedDraft, StagedDraft, UnrolledDraft
from .continued import ContinuedDraft
from .draft import (
    CachedDraft,
    DraftRecord,
    FirstDraft,
    HeadsDraft,
    NoDraft,
    RecurrentDraft,
    RecyclingDraft,
    SuffixDraft,
)
from .iterated import CorpusDraft, InputDraft, JacobiDraft, LookaheadDraft
from .joined import JoinedHeadsDraft
from .length import (
    AcceptanceLength,
    ConfidenceLength,
    FixedLength,
    GoodputLength,
    LengthRecord,
    SvipLength,
    ThompsonLength,
)
from .policy import (
    Contrastive,
    FullDepth,
    Judge,
    KeepAll,
    Lossless,
    SpecTr,
    TopKAccept,
    Typical,
    VerifyRecord,
)
from .prompted import PromptDraft
from .trained import untrained
from .tree import BestFirst, Chain, SampledTree, StaticTree, TreeRecord, WidenedChain

__all__ = [
    "RECORDS",
    "AcceptanceLength",
    "BestFirst",
    "CachedDraft",
    "Chain",
    "ConfidenceLength",
    "ContinuedDraft",
    "Contrastive",
    "CorpusDraft",
    "DecodePlan",
    "DraftRecord",
    "FirstDraft",
    "FixedLength",
    "FullDepth",
    "FusedDraft",
    "GoodputLength",
    "HeadsDraft",
    "InputDraft",
    "JacobiDraft",
    "JoinedHeadsDraft",
    "Judge",
    "KeepAll",
    "LengthRecord",
    "LookaheadDraft",
    "Lossless",
    "MergedDraft",
    "NoDraft",
    "PromptDraft",
    "Record",
    "RecurrentDraft",
    "RecyclingDraft",
    "SampledTree",
    "SpecTr",
    "StagedDraft",
    "StaticTree",
    "SuffixDraft",
    "SvipLength",
    "ThompsonLength",
    "TopKAccept",
    "TreeRecord",
    "Typical",
    "UnrolledDraft",
    "VerifyRecord",
    "WidenedChain",
    "record",
    "untrained",
]


@dataclass(frozen=True)
class DecodePlan:
    """Drafter, tree, length, verification, depth and cache policies of a generation loop."""

    draft: DraftRecord = field(default_factory=NoDraft)
    tree: TreeRecord = field(default_factory=Chain)
    length: LengthRecord = field(default_factory=FixedLength)
    verify: VerifyRecord = field(default_factory=Lossless)
    depth: Record = field(default_factory=FullDepth)
    cache: Record = field(default_factory=KeepAll)

    @property
    def most(self) -> int:
        """Draft tokens that a step verifies at most.

        Every drafter's own limit counts, and the tree's where a drafter follows it.
        """
        return _most(self.draft, self.tree.most)

    @property
    def columns(self) -> int:
        """Tokens that a step is fed at most beside the last committed one: drafts and riders."""
        return self.most + self.draft.riders(self.most)


def _most(draft: DraftRecord, tree: int | None) -> int:
    if draft.most is not None:
        return draft.most
    if isinstance(draft, FirstDraft):
        return max(_most(part, tree) for part in draft.of)
    if isinstance(draft, MergedDraft):
        return sum(_most(part, tree) for part in draft.of)
    # A chain of no given depth has a token a level.
    return getattr(draft, "levels", 0) if tree is None else tree
