"""Let a reward model read along, and keep drafts that it finds good, whoever would write them.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]

After (model="path")::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V]
    func reward(tokens: i64[B,T], positions: i64[B,T]) -> reward f32[B,T]
    decode {
      step = accompanied(function="step", beside="reward")
      verify = rewarded(threshold=0.7, guest="reward")
    }

A smaller model writes a step of a thought; where the reward of the text with it reaches the
threshold, it stays, else the target writes one in its place (Liao et al., "Reward-Guided
Speculative Decoding for Efficient LLM Reasoning", 2025). The drafter and `length_stretch`, which
says where such steps end, are passes of their own.

The reward model is a folder with a head of one score, whose sigmoid is the reward, or of two
labels, where it is the second one's probability (see `frontends.import_scoring`). It has weights
and caches of its own; fusions and numerics come to it as to the model, because what it says counts.
Approximate: the text is the draft's where that is good enough, and is meant to be. Refuses what
`draft_model` refuses of a model, models that read anything but texts, a reward model with
recurrences or other labels, and a plan with another verifier or a step that is more than one
function.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from ...ir import Function, PassError, Program, type_of
from ...ir.plan import Rewarded
from ..drafting.guest_step import accompanied, any_guest_of, check_tokens, reading
from ..engine.base import Effect, Outcome
from ..engine.plan_edits import with_record
from ..policies import RecordPass, builds
from .verify_suspicion import RECURRENT

A = torch.ops.aten
NAME = "reward"


@builds(Rewarded)
class VerifyRewarded(RecordPass):
    """model: the reward model, a checkpoint folder with the model's tokens. The rest: see the
    record."""

    model: str = ""

    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})
    reads: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS})
    brings: ClassVar[str] = "a reward model"

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    @property
    def models_are(self) -> Literal["scoring"]:
        return "scoring"

    def run(self, program: Program) -> Outcome:
        guest = any_guest_of(program, self.model, self.name, NAME)
        check_tokens(program, guest, self.name)
        if any(guest.step.calls(op) for op in RECURRENT):
            raise PassError(
                f"{self.name}: {guest.name} has recurrences, which cannot go back to where a draft "
                f"was rejected: choose a reward model without"
            )
        rewards = self._rewards(guest, program.info.vocab_size)
        both, remarks = accompanied(program, guest, self.model, self.name, rewards)
        return Outcome(with_record(both, self.name, self.made(guest=NAME)), 1, remarks=remarks)

    def _rewards(self, guest: Program, size: int) -> Function:
        """The guest's function from `size` tokens to rewards. Errors: `PassError` for scores that
        are none."""
        table = next(iter(guest.step.calls(A.embedding.default))).all_input_nodes[0]
        known = type_of(table).shape[0]  # its vocabulary counts scores
        fn = Function(NAME, reading(guest, known, size).graph)
        scores = fn.outputs["logits"]
        labels = type_of(scores).dims[-1]
        if labels not in (1, 2):
            raise PassError(
                f"{self.name}: expected a head of one score, or of two labels of which the second "
                f"is good, got {labels} of {guest.name}"
            )
        with fn.graph.inserting_before(fn.output_node):
            wide = fn.call(A._to_copy.default, scores, dtype=torch.float32)
            if labels == 1:
                rewards = fn.call(A.sigmoid.default, wide)
            else:
                rewards = fn.call(A.softmax.int, wide, -1)
            fn.set_outputs({NAME: fn.call(A.select.int, rewards, -1, int(labels) - 1)})
        return fn
