"""A model, or a layer on the target's features, that predicts all levels of a draft in one call.

Sources: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation"
(2025); "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (2026).
"""

from __future__ import annotations

from dataclasses import replace

from ....ir.plan import ParallelDraft
from ..setting import Setting
from .base import PROPOSERS, Level
from .cached import CachedProposer
from .hidden import level_of
from .prompts import ByDepth


@PROPOSERS.register(ParallelDraft)
class ParallelProposer(ByDepth, CachedProposer):
    """Feeds mask tokens behind what the text has gained. Level d's candidates are what was said
    after mask token d, for every node of that depth.

    said: the candidates after the text's last token and after each mask token, [B,1+M,...].
    """

    record: ParallelDraft

    def __init__(self, record: ParallelDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.masks = [record.token] * record.masks

    @property
    def ahead(self) -> int:
        """The rows of mask tokens."""
        masks: int = self.record.masks
        return masks

    def root(self, count: int) -> Level:
        """What may follow each text's last token; everything else is said along with it."""
        outputs = self.committed.catch_up(self.masks)
        self.said = level_of(outputs, outputs["draft_tokens"].shape[-1])
        if self.said.logits is not None:
            # A copy: outputs live until the next run.
            self.said = replace(self.said, logits=self.said.logits.copy())
        self.said.tokens[self.committed.lacking] = -1
        return super().root(count)

    def level(self, count: int) -> Level:
        """What was said after a mask token, or after the last token of the text."""
        place, said = slice(self.place, self.place + 1), self.said
        logits = None if said.logits is None else said.logits[:, place]
        return Level(said.tokens[:, place, :count], said.scores[:, place, :count], logits)
