"""What passes that grow draft heads onto a program have in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ..ir import Program
from ..ir.plan import CachedDraft, ContinuedDraft, DraftRecord
from .base import Contract, Effect, Pass
from .plan_edits import with_draft


class DraftPass(Pass):
    """Base of passes that insert trained drafters. They work on the canonical program, so that
    caches, fusions and quantization come to their functions as they come to the step.

    weights: a file of trained weights, or the folder that training wrote; empty: untrained ones.
    candidates: best tokens that a draft function returns. decay: in training, a level's loss
    weighs decay to the power of its depth.
    """

    weights: str = ""
    candidates: int = Field(default=10, ge=1)
    decay: float = Field(default=0.8, gt=0)

    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})

    def continued(self, program: Program, first: CachedDraft, then: DraftRecord) -> Program:
        """The program with a drafter of two parts, of which `then` goes on where `first` stops."""
        draft = ContinuedDraft(first, then, decay=self.decay, trained=bool(self.weights))
        return with_draft(program, draft)
