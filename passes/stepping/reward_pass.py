"""What passes share that let a reward model read along and give its verdict to a verifier."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from ...ir import Function, PassError, Program, type_of
from ..drafting.guest_step import accompanied, any_guest_of, check_tokens, reading
from ..engine.base import Effect, Outcome
from ..engine.plan_edits import with_record
from ..policies import RecordPass
from .verify_suspicion import RECURRENT

A = torch.ops.aten
NAME = "reward"


class RewardPass(RecordPass):
    """Base of passes whose verifiers ask a reward model.

    model: the reward model, a checkpoint folder with the model's tokens. bounded: whether rewards
    are 0..1.

    It has a head of one score, or of two labels, where the score is the log odds of the second (see
    `frontends.import_scoring`); a bounded reward is the score's sigmoid. It has weights and caches
    of its own; fusions and numerics come to it as to the model, because what it says counts.
    Refuses what `draft_model` refuses of a model, models that read anything but texts, a reward
    model with recurrences or other labels, and a step that is more than one function.
    """

    model: str = ""

    bounded: ClassVar[bool] = False
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
            reward = fn.call(A.select.int, wide, -1, int(labels) - 1)
            if labels == 2:
                reward = fn.call(A.sub.Tensor, reward, fn.call(A.select.int, wide, -1, 0))
            if self.bounded:
                reward = fn.call(A.sigmoid.default, reward)
            fn.set_outputs({NAME: reward})
        return fn
