"""Let a smaller model write where it is sure, and the target where it is not.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (model="path")::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func small(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    decode {
      depth = entropy(function="small", threshold=1.0, window=8, least=4, pending=31, context=None)

The other model's step becomes a function of this program, with weights and a cache of its own, and
`pick_logits`, `add_argmax` and numerics come to it as to the step, because what it says counts. The
next token is the target's where the entropy of the distributions that the latest `window` tokens
were chosen from is above the threshold, in the mean, and the small model's where it is not
(Simonds, "Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference", 2025).
Prompts run through both. Approximate: the text is neither model's own. Refuses what `draft_model`
refuses of a model.
"""

from __future__ import annotations

from typing import ClassVar

from ....ir import Program, Role
from ...drafting.guest_step import guest_of, tokenizer_remarks, with_step_of
from ...engine.base import Effect, Outcome
from ...engine.plan_edits import with_record
from ...policies import RecordPass, builds
from . import EntropyDepth

NAME = "small"


@builds(EntropyDepth)
class DepthEntropy(RecordPass):
    """model: folder of the smaller model's checkpoint. The rest: see the record."""

    model: str = ""

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})
    brings: ClassVar[str] = "a smaller model"

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    def run(self, program: Program) -> Outcome:
        guest = guest_of(program, self.model, self.name, NAME)
        made = with_step_of(program, guest, self.model, NAME, Role.TARGET)
        short = guest.info.context < program.info.context
        record = self.made(function=NAME, context=guest.info.context if short else None)
        remarks = tokenizer_remarks(program, guest)
        return Outcome(with_record(made, self.name, record), 1, remarks=remarks)
