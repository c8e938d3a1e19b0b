"""Let a smaller model write where it is sure, and the target where it is not.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (model="path")::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], entropy f32[B,T] {
      %logs: f32[B,T,V] = aten._log_softmax(%logits, -1, False)
      %sum: f32[B,T] = aten.sum(exp(%logs) * clamp(%logs, -1e4), [-1])
      %entropy: f32[B,T] = aten.mul(%sum, -1.4427)
    func small(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V], entropy f32[B,T]
    decode {
      depth = entropy(function="small", threshold=1.0, window=8, least=4, pending=31, context=None)

The other model's step becomes a function of this program, with weights and a cache of its own, and
`pick_logits`, `add_argmax` and numerics come to it as to the step, because what it says counts. The
next token is the target's where the entropy of the distributions that the latest `window` tokens
were chosen from is above the threshold, in the mean, and the small model's where it is not
(Simonds, "Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference", 2025).
What the small model lacks of the text, prompt included, it reads
when its turn comes. Approximate: the text is neither model's own. Refuses what `draft_model`
refuses of a model.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from ....ir import Function, Program, Role, site_of, type_of
from ...drafting.guest_step import guest_of, tokenizer_remarks, with_step_of
from ...engine.base import Effect, Outcome
from ...engine.plan_edits import with_record
from ...policies import RecordPass, builds
from . import ENTROPY, EntropyDepth

A = torch.ops.aten
NAME = "small"
LEAST = -1e4
"""Logarithm of a probability that stands for smaller ones, those of 0 among them."""


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
        for name in (program.step.name, NAME):
            made = made.with_function(_with_entropy(made.function(name)))
        short = guest.info.context < program.info.context
        record = self.made(function=NAME, context=guest.info.context if short else None)
        remarks = tokenizer_remarks(program, guest)
        return Outcome(with_record(made, self.name, record), 1, remarks=remarks)


def _with_entropy(function: Function) -> Function:
    """A function that returns, too, the entropies f32[B,T] of its distributions, in bits."""
    fn = function.copy()
    logits = fn.outputs["logits"]
    with fn.graph.inserting_before(fn.output_node):
        known = logits
        if type_of(logits).dtype != torch.float32:
            known = fn.call(A._to_copy.default, logits, dtype=torch.float32)
        logs = fn.call(A._log_softmax.default, known, -1, False)
        parts = fn.call(
            A.mul.Tensor, fn.call(A.exp.default, logs), fn.call(A.clamp.default, logs, LEAST)
        )
        total = fn.call(A.sum.dim_IntList, parts, [-1])
        entropy = fn.call(A.mul.Tensor, total, -1 / math.log(2), site=site_of(logits))
    fn.set_outputs({**fn.outputs, ENTROPY: entropy})
    return fn
