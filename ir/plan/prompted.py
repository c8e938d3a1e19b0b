"""Draft records of trained prompt tokens: behind a step's own, or in a draft's call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Returned, Size, record
from .bounds import Factor, Filled, Levels, Nodes, Part, Place, Share
from .draft import CachedDraft, LearningDraft

if TYPE_CHECKING:
    from .decode import DecodePlan


@record
@dataclass(frozen=True)
class PromptDraft(LearningDraft):
    """Prompt tokens behind the nodes of a draft, which predict the places ahead (PPD).

    The step takes the ids vocabulary + 0, 1, ... for them, and returns the best ``draft_tokens``
    and ``draft_scores`` (log probabilities) [B,S,K] after every token. weight: f[prompts,H], their
    trained embeddings. prompts: in a row behind a node, and so the places that are predicted.
    after: nodes that get some, the root counted: those where verification will likeliest end.
    decay: in training, the weight of level d's loss is decay^d. trained: whether the weights know
    anything.
    """

    weight: Filled[str] = "ppd.prompts"
    prompts: Levels = 3
    after: Nodes = 8
    decay: Factor = 0.8
    trained: Filled[bool] = False
    kind: ClassVar[str] = "prompts"
    grows: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("draft_tokens", "draft_scores")

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`."""
        yield plan.step.plain, {"draft_tokens": ("", "", "K"), "draft_scores": ("", "", "K")}

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        """See `Record.looks_up`."""
        yield self.weight, False, (self.prompts, "")

    @property
    def levels(self) -> int:
        """Places predicted."""
        return self.prompts

    def riders(self, nodes: int) -> int:
        """`prompts` for each node that gets some."""
        return self.prompts * min(self.after, nodes + 1)


@record
@dataclass(frozen=True)
class MaskedSkippingDraft(LearningDraft):
    """The target's first and last layers, and mask tokens behind the last one (S3D).

    functions: of a step that is cut, the segments that draft, and the head. The first takes the ids
    vocabulary + 0, 1, ... for mask tokens; a draft is one call, on the last token and all of them,
    and verification writes its rows anew. weight: f[prompts,H], their trained embeddings. prompts:
    how many; one token more is drafted. decay: in training, the weight of level d's loss is
    decay^d. trained: whether the weights know anything.
    """

    functions: Filled[tuple[str, ...]] = ("step.0", "step.2", "step.head")
    weight: Filled[str] = "s3d.masks"
    prompts: Levels = 3
    decay: Factor = 0.8
    trained: Filled[bool] = False
    kind: ClassVar[str] = "masked_skipping"
    requires: ClassVar[frozenset[str]] = frozenset({"segments"})
    grows: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    always: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`."""
        yield from ((name, {}) for name in self.functions[:-1])
        yield self.functions[-1], {"logits": ("", "", "V")}

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        """See `Record.looks_up`."""
        yield self.weight, False, (self.prompts, "")

    @property
    def levels(self) -> int:
        """A token for each mask token, and one for the last token of the text."""
        return self.prompts + 1


@dataclass(frozen=True)
class OneCallDraft(CachedDraft):
    """Base of drafters with a cache that predict all `levels` in one call, by mask tokens.

    token: the id of a mask. weight: f[1,H], the trained embedding of the id, which then is the
    vocabulary's size; None: the id is a token that the function knows anyway.
    """

    token: Place = 0
    weight: Filled[str | None] = None
    stepwise: ClassVar[bool] = False
    unrolls: ClassVar[None] = None

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        """See `Record.looks_up`."""
        if self.weight:
            yield self.weight, False, (1, "")


@record
@dataclass(frozen=True)
class ParallelDraft(OneCallDraft):
    """A drafter that reads mask tokens as it reads text (PARD, P-EAGLE).

    Behind the text's last token the function is fed the id `token` levels - 1 times, for tokens
    that nobody knows yet: what it says after the k-th of them is about the place k further on.
    Their rows are forgotten; where it takes ``hidden``, it looks past what stands beside them.
    keep: in training, the part of a level's places that the next one has, too. least: the part of
    all places that every level has.
    """

    keep: Part = 0.7
    least: Share = 0.2
    kind: ClassVar[str] = "parallel"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical", "drafts"})
    provides: ClassVar[frozenset[str]] = frozenset()

    @property
    def masks(self) -> int:
        """Tokens behind the last one."""
        return self.levels - 1


@record
@dataclass(frozen=True)
class BlockDraft(OneCallDraft):
    """Layers over a cache of the target's features that predict a block (DFlash).

    The function is fed the text's last token and the id `token` once for each of the `levels` that
    it drafts, which all see each other; what it says after the k-th is about that very place. Their
    rows are forgotten. Rows of the text are made of ``hidden`` alone, beside the id `blank`.
    anchors: in training, the part of a text's places at which a block begins.
    """

    blank: Filled[Place] = 0
    anchors: Part = 0.2
    kind: ClassVar[str] = "block"

    @property
    def mutual(self) -> tuple[str, ...]:
        """`function`."""
        return (self.function,)
