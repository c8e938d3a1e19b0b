"""Jacobi decoding whose guesses are sampled, and verified as drafts of the last step's target.

Source: Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding" (SJD, 2024).

Under sampling a guess x is drawn from what the target said of its place after the guesses of the
step before, q, and is kept with probability min(1, p(x) / q(x)) by what it says now, p; all guesses
behind the first one that is not kept are drawn anew. Near the fixed point p is close to q, and most
guesses are kept, where `jacobi` would keep the likeliest token with its probability alone. Greedy
decoding is that of `jacobi`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ....ir.plan import policy
from ....runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ....runtime.speculate.drafters.base import DRAFTERS
from ....runtime.speculate.sampling import warp, whole
from ....runtime.speculate.setting import Setting
from ..jacobi import JacobiDraft, JacobiDrafter, below, filled


@policy
@dataclass(frozen=True)
class SpeculativeJacobiDraft(JacobiDraft):
    """A block of guesses, sampled every step from what the target says after each of them.

    Speculative Jacobi decoding (Teng et al. 2024). tokens: of the block. Needs the step's
    ``argmax`` (pass add_argmax), which is the next guess in greedy decoding.
    """

    kind: ClassVar[str] = "speculative_jacobi"
    samples: ClassVar[bool] = True


@DRAFTERS.register(SpeculativeJacobiDraft)
class SpeculativeJacobiDrafter(JacobiDrafter):
    """Keeps what each guess was drawn from. See the module docstring."""

    record: SpeculativeJacobiDraft

    def __init__(self, record: SpeculativeJacobiDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        if self.options.do_sample:
            self.wants = ("logits",)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.drawn: list[torch.Tensor] = [torch.empty(0)] * len(prompts)

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        if not self.options.do_sample:
            return super().propose(rooms)
        return [
            Draft(block[:room], self._told(index, block[:room])) if room > 0 else NO_DRAFT
            for index, (block, room) in enumerate(zip(self.blocks, rooms, strict=True))
        ]

    def _told(self, index: int, block: Sequence[int]) -> torch.Tensor:
        """What the guesses of a block were drawn from, f32[N,V]; those that were not are sure."""
        drawn = self.drawn[index][: len(block)]
        size = self.executable.program.info.vocab_size
        told = torch.zeros(len(block), size)
        told[: len(drawn)] = drawn.reshape(len(drawn), size)
        for place in range(len(drawn), len(block)):
            told[place, block[place]] = 1.0
        return told

    def observe(self, taken: VerifiedStep) -> None:
        if not self.options.do_sample:
            super().observe(taken)
            return
        logits = taken.outputs["logits"]
        rows = zip(taken.drafts, taken.paths, taken.tokens, strict=True)
        for index, (draft, path, tokens) in enumerate(rows):
            if not tokens or not draft.tokens:
                continue
            columns = [node + 1 for node in below(draft, path)][: self.record.tokens]
            guesses: list[int] = []
            self.drawn[index] = torch.empty(0)
            if columns:
                chances = warp(logits[index, columns].to("cpu", torch.float32), self.options)
                guesses = chances.draw(self.options.random())
                self.drawn[index] = whole(chances, logits.shape[-1])
            self.blocks[index] = filled(guesses, tokens, self.record.tokens)
