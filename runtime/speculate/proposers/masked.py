"""The first and the last layers draft several tokens in one call, by mask tokens.

Source: Zhong and Bharadwaj, "S3D: A Simple and Cost-Effective Self-Speculative Decoding Scheme for
Low-Memory GPUs" (2024). The rows that a draft writes are written anew by verification, which runs
the layers between, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.plan import MaskedSkippingDraft
from ..drafters.base import VerifiedStep
from ..setting import Setting
from .base import PROPOSERS, ByDepth, Level

FETCH = ("logits",)


@PROPOSERS.register(MaskedSkippingDraft)
class MaskedProposer(ByDepth):
    """Level d's candidates are what was said after mask token d, for every node of that depth.

    said: f32[B,1+M,V], the logits after the last token and after each mask token.
    """

    record: MaskedSkippingDraft

    def __init__(self, record: MaskedSkippingDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        assert setting.feeder is not None, "whoever drafts with the target's layers is told of them"
        program = self.executable.program
        self.feeder, self.texts = setting.feeder, setting.texts
        size = program.info.vocab_size
        self.masks = list(range(size, size + record.prompts))

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is kept of what is committed: the target's caches hold it."""

    def observe(self, taken: VerifiedStep) -> None:
        """See `begin`."""

    def root(self, count: int) -> Level:
        """What may follow each text's last token; everything else is said along with it."""
        rows = [[] if text.done else [text.tokens[-1], *self.masks] for text in self.texts]
        past = [0 if text.done else text.rows for text in self.texts]
        starts = [0 if text.done else text.position for text in self.texts]
        # Where the caches or the model's positions end, nobody asks for as many levels.
        left = min(self.executable.limit - max(past), self.feeder.context - max(starts))
        many = min(1 + len(self.masks), left)
        rows = [row[:many] for row in rows]
        width, functions = self.feeder.width(many, max(past)), self.record.functions
        outputs = self.feeder.run_parts(functions, rows, past, starts, width, FETCH)
        # A copy: outputs live until the next run.
        self.said = outputs["logits"][:, :many].float().cpu().clone()
        return super().root(count)

    def level(self, count: int) -> Level:
        """What was said after a mask token, or after the last token of the text."""
        said = self.said[:, self.place : self.place + 1]
        best = said.log_softmax(-1).topk(count)
        return Level(best.indices.numpy(), best.values.numpy(), said.numpy())
