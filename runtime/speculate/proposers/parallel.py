"""A model, or layers on the target's features, that predict all levels of a draft in one call.

Sources: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation"
(2025); "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (2026); Chen et al., "DFlash:
Block Diffusion for Flash Speculative Decoding" (2026).
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from ....ir.plan import BlockDraft, ParallelDraft
from .base import PROPOSERS, ByDepth, Ids, Level
from .cached import CachedProposer
from .hidden import level_of


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
        """The tokens i64[B,R] behind each text; of these and the text's last row, the last as many
        as there are levels say something."""

    def level(self, count: int) -> Level:
        """What was said about the depth that is asked for."""
        place, said = slice(self.place, self.place + 1), self.said
        logits = None if said.logits is None else said.logits[:, place]
        return Level(said.tokens[:, place, :count], said.scores[:, place, :count], logits)


@PROPOSERS.register(ParallelDraft)
class ParallelProposer(OneCallProposer):
    """Feeds mask tokens. Level d's candidates are what was said after mask token d, the first what
    was said after the text."""

    record: ParallelDraft

    @property
    def ahead(self) -> int:
        """The rows of mask tokens."""
        masks: int = self.record.masks
        return masks

    def riders(self) -> Ids:
        """Mask tokens."""
        batch = len(self.committed.texts)
        return np.full((batch, self.record.masks), self.record.token, dtype=np.int64)


@PROPOSERS.register(BlockDraft)
class BlockProposer(OneCallProposer):
    """Feeds the text's last token, whose features the target has yet to make, and mask tokens.
    Level d's candidates are what was said of mask token d."""

    record: BlockDraft
    mutual = True

    @property
    def blank(self) -> int:
        """The record's."""
        return self.record.blank

    @property
    def ahead(self) -> int:
        """The rows of a block."""
        return 1 + self.record.levels

    def riders(self) -> Ids:
        """A block for each text."""
        last = np.array([text[-1:] for text in self.committed.texts], dtype=np.int64)
        return np.pad(last, ((0, 0), (0, self.record.levels)), constant_values=self.record.token)
