"""The first and the last layers draft several tokens in one call, by mask tokens.

Source: Zhong and Bharadwaj, "S3D: A Simple and Cost-Effective Self-Speculative Decoding Scheme for
Low-Memory GPUs" (2024). The rows that a draft writes are written anew by verification, which runs
the layers between, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DecodePlan, LearningDraft, Returned, Size, record
from ....ir.plan.bounds import Factor, Filled, Levels
from ....runtime.feeding.feed import StepFeed
from ....runtime.speculate.level import Level
from ....runtime.speculate.proposers.base import PROPOSERS, ByDepth, LayersProposer
from ....runtime.speculate.proposers.hidden import best_of
from ....runtime.speculate.setting import Setting


@record
@dataclass(frozen=True)
class MaskedSkippingDraft(LearningDraft):
    """The target's first and last layers, and mask tokens behind the last one (S3D).

    functions: of a step that is cut, the segments that draft, and the head. The first takes the ids
    vocabulary + 0, 1, ... for mask tokens; a draft is one call, on the last token and all of them,
    and verification writes its rows anew. weight: f[prompts,H], their trained embeddings. prompts:
    how many; one token more is drafted. decay: in training, the weight of level d's loss is
    decay^d.
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
        yield from ((name, {}) for name in self.functions[:-1])
        yield self.functions[-1], {"logits": ("", "", "V")}

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        yield self.weight, False, (self.prompts, "")

    @property
    def levels(self) -> int:
        """A token for each mask token, and one for the last token of the text."""
        return self.prompts + 1


FETCH = ("logits",)


@PROPOSERS.register(MaskedSkippingDraft)
class MaskedProposer(ByDepth, LayersProposer):
    """Level d's candidates are what was said after mask token d, for every node of that depth.

    said: f32[B,1+M,V], the logits after the last token and after each mask token.
    """

    record: MaskedSkippingDraft

    def __init__(self, record: MaskedSkippingDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        size = self.executable.program.info.vocab_size
        self.masks = list(range(size, size + record.prompts))

    def root(self, count: int) -> Level:
        """What may follow each text's last token; everything else is said along with it."""
        rows = [[] if text.done else [text.tokens[-1], *self.masks] for text in self.texts]
        past, starts = self.ends()
        # Where the caches or the model's positions end, fewer levels are asked for.
        left = min(self.executable.limit - max(past), self.feeder.context - max(starts))
        many = min(1 + len(self.masks), left)
        rows = [row[:many] for row in rows]
        step = StepFeed(rows, past, starts, FETCH)
        outputs = self.feeder.run_parts(self.record.functions, step, FETCH)
        # A copy: outputs live until the next run.
        self.said = outputs["logits"][:, :many].float().cpu().clone()
        return super().root(count)

    def level(self, count: int) -> Level:
        return best_of(self.said[:, self.place : self.place + 1], count)
