"""A model, or layers on the target's features, that predict all levels of a draft in one call.

Sources: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation"
(2025); "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (2026); Chen et al., "DFlash:
Block Diffusion for Flash Speculative Decoding" (2026).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....ir.plan import CachedDraft, Size, record
from ....ir.plan.bounds import Filled, Part, Place, Share
from ....runtime.speculate.level import Ids, Level
from ....runtime.speculate.proposers.base import PROPOSERS, ByDepth
from ....runtime.speculate.proposers.cached import CachedProposer
from ....runtime.speculate.proposers.hidden import level_of
from ....runtime.speculate.setting import Setting


@dataclass(frozen=True)
class OneCallDraft(CachedDraft):
    """Base of drafters with a cache that predict all `levels` in one call, by mask tokens.

    token: the id of a mask. weight: f[1,H], the trained embedding of the id, which then is the
    vocabulary's size; None: the id is a token that the function knows anyway.
    """

    token: Place = 0
    weight: Filled[str | None] = None
    stepwise: ClassVar[bool] = False
    unrolls: ClassVar[bool] = False

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        if self.weight:
            yield self.weight, False, (1, "")


@record
@dataclass(frozen=True)
class ParallelDraft(OneCallDraft):
    """A drafter that reads mask tokens as it reads text (PARD, P-EAGLE).

    Behind the text's last token the function is fed the id `token` levels - 1 times, for tokens
    not known yet: what it says after the k-th of them is about the place k further on.
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


class OneCallProposer(ByDepth, CachedProposer):
    """Feeds tokens behind what the text has gained, and reads off them what each level says, for
    every node of that depth.

    said: the candidates by level, [B,L,...].
    """

    def root(self, count: int) -> Level:
        """What may follow each text's last token; everything else is said along with it."""
        riders = self.riders()
        outputs = self.committed.catch_up(riders)
        said = level_of(outputs, outputs["draft_tokens"].shape[-1])
        first = 1 + riders.shape[1] - self.record.levels
        logits = said.logits
        if logits is not None:
            # A copy: outputs live until the next run.
            logits = logits[:, first:].copy()
        self.said = Level(said.tokens[:, first:], said.scores[:, first:], logits)
        self.said.tokens[self.committed.lacking] = -1
        return super().root(count)

    @abstractmethod
    def riders(self) -> Ids:
        """The tokens i64[B,R] behind each text; the last `levels` rows make the predictions."""

    def level(self, count: int) -> Level:
        place, said = slice(self.place, self.place + 1), self.said
        logits = None if said.logits is None else said.logits[:, place]
        return Level(said.tokens[:, place, :count], said.scores[:, place, :count], logits)


@PROPOSERS.register(ParallelDraft)
class ParallelProposer(OneCallProposer):
    """Feeds mask tokens: level d + 1 is said after mask token d, level 1 after the text."""

    record: ParallelDraft

    def __init__(self, record: ParallelDraft, setting: Setting) -> None:
        self.ahead = record.masks
        super().__init__(record, setting)

    def riders(self) -> Ids:
        batch = len(self.committed.texts)
        return np.full((batch, self.record.masks), self.record.token, dtype=np.int64)
