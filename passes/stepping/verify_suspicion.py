"""Let a reference model read along, and replace tokens that it finds far less likely.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (model="path")::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func reference(tokens: i64[B,T], positions: i64[B,T]) -> reference f32[B,T,V]
    decode {
      step = accompanied(function="step", beside="reference")
      verify = suspicion(alpha=20.0, guest="reference")
    }

With p the model's distribution and q the reference's, a token x that the model chose is suspicious
if p(x) >= alpha q(x); the reference's own choice then takes its place (Li et al., "CleanGen:
Mitigating Backdoor Attacks for Generation Tasks in Large Language Models", 2024). Tokens that the
reference's vocabulary lacks are suspicious always.

Every token is checked, a text's first and last ones, too, and what checks one is the text before
it. So the text depends neither on drafts nor on how many tokens a step checks: several are cheaper
(`draft_own` for the paper's four, or any drafter). The reference has weights and caches of its own;
fusions and numerics come to it as to the model, because what it says counts. Approximate: the text
is another one, and is meant to be. Refuses what `draft_model` refuses of a model, models that read
anything but texts, a reference with recurrences, and a plan with another verifier or a step that is
more than one function.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...ir import Function, PassError, Program
from ...ir.plan import Suspicion
from ..drafting.guest_step import accompanied, guest_of
from ..engine.base import Effect, Outcome
from ..engine.plan_edits import with_record
from ..policies import RecordPass, builds

G = torch.ops.graftwork
NAME = "reference"
RECURRENT = (G.linear_attention.default, G.causal_conv.default)


@builds(Suspicion)
class VerifySuspicion(RecordPass):
    """model: the reference, a checkpoint folder or .gguf file with the model's tokens. The rest:
    see the record."""

    model: str = ""

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})
    reads: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS})
    brings: ClassVar[str] = "a reference model"

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    def run(self, program: Program) -> Outcome:
        guest = guest_of(program, self.model, self.name, NAME)
        if any(guest.step.calls(op) for op in RECURRENT):
            raise PassError(
                f"{self.name}: {guest.name} has recurrences, which cannot go back to where a token "
                f"was replaced: choose a reference without"
            )
        said = Function(NAME, guest.step.copy().graph)
        said.set_outputs({NAME: said.outputs["logits"]})
        both, remarks = accompanied(program, guest, self.model, self.name, said)
        return Outcome(with_record(both, self.name, self.made(guest=NAME)), 1, remarks=remarks)
