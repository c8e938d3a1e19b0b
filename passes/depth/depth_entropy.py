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

from ...ir import Program, Role
from ...ir.plan import EntropyDepth
from ...ir.plan.bounds import Amount, Nodes
from ..drafting.guest_step import guest_of, untold, with_step_of
from ..drafting.plan_edits import with_record
from ..engine.base import Contract, Effect, Outcome, Pass, register

NAME = "small"


@register
class DepthEntropy(Pass):
    """model: folder of the smaller model's checkpoint. threshold: of the mean entropy, in bits;
    window: tokens that it is a mean of. least: tokens that a model writes before the other may.
    pending: tokens that one may lack before it reads them all."""

    model: str = ""
    threshold: Amount = 1.0
    window: Nodes = 8
    least: Nodes = 4
    pending: Nodes = 31

    name: ClassVar[str] = "depth_entropy"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})

    brings: ClassVar[str] = "a smaller model"

    @property
    def models(self) -> tuple[str, ...]:
        """The smaller model's folder."""
        return (self.model,)

    def run(self, program: Program) -> Outcome:
        """Take the model in. See the module docstring."""
        guest = guest_of(program, self.model, self.name, NAME)
        made = with_step_of(program, guest, self.model, NAME, Role.TARGET)
        short = guest.info.context < program.info.context
        record = EntropyDepth(
            NAME,
            self.threshold,
            self.window,
            self.least,
            self.pending,
            guest.info.context if short else None,
        )
        remarks = untold(program, guest)
        return Outcome(with_record(made, self.name, record), 1, remarks=remarks)
