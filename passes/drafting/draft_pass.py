"""What passes that insert trained weights have in common, and those of them that draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from ...ir import Function, Program
from ...ir.plan import CachedDraft, ContinuedDraft, LearningDraft
from ...ir.plan.bounds import Nodes
from ..engine.base import STATES, Effect, Outcome, PassDefinitionError
from ..engine.plan_edits import with_draft
from ..policies import RecordPass
from .draft_vocabulary import DraftVocabulary
from .grafts import Graft
from .trained import TrainedWeights, as_published


class TrainedPass(RecordPass):
    """Base of passes that insert trained weights, by `insert`. A file of weights is used whole or
    refused; untrained weights are remarked.

    weights: a file of trained weights, or the folder that training wrote; empty: untrained ones.
    unread: names in published files that may stay unread, because they repeat the target's.
    """

    weights: str = ""

    unread: ClassVar[tuple[str, ...]] = ()
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})
    reads: ClassVar[frozenset[Effect]] = STATES

    @property
    def knows(self) -> bool:
        """Whether what it inserts knows anything: weights are given, or none are needed."""
        return bool(self.weights)

    def made(self, **filled: Any) -> Any:
        return super().made(**{"trained": self.knows, **filled})

    @property
    def files(self) -> tuple[str, ...]:
        return (self.weights,) if self.weights else ()

    def run(self, program: Program) -> Outcome:
        """Insert the weights. Errors: `PassError` naming a tensor of the file that has no place."""
        outcome = self.insert(program)
        if self.weights:
            given = TrainedWeights(self.weights, self.name, program, self.published)
            given.check_tuned(program)
            given.check_all_used(self.trained(program, outcome.program), self.unread)
        if self.knows:
            return outcome
        remark = (
            "its weights are untrained and know nothing: train them (graftwork train, or "
            f"graftwork.fit), then set {self.name}.weights; until then recipes whose length gives "
            f"drafts up draft nothing"
        )
        return replace(outcome, remarks=(*outcome.remarks, remark))

    def graft(self, program: Program, function: str, onto: Function | None = None) -> Graft:
        """A function to be grown onto the program, of the trained weights if there are some."""
        return Graft(program, self.name, function, self.weights, self.published, onto)

    def trained(self, before: Program, after: Program) -> set[str]:
        """Names of the weights that a file for this pass has: those that it inserted."""
        return set(after.weights) - set(before.weights)

    def insert(self, program: Program) -> Outcome:
        """Transform the program, with the trained weights if there are some."""
        raise PassDefinitionError(f"pass {type(self).__name__} does not define insert()")

    def published(self, name: str) -> tuple[str, ...]:
        """The names that a weight of this pass may have in published files."""
        return as_published(name)


class DraftPass(TrainedPass):
    """Base of passes that insert trained drafters. They work on the canonical program, so that
    caches, fusions and quantization come to their functions as they come to the step.

    weights: see `TrainedPass`. candidates: best tokens that a draft function returns.
    """

    candidates: Nodes = 10

    def continued(
        self, program: Program, first: CachedDraft, then: LearningDraft, **training: Any
    ) -> Program:
        """The program with a `ContinuedDraft` of two parts, of which `then` goes on where `first`
        stops. training: fields of it that are no options."""
        draft: ContinuedDraft = self.made(**training)
        decay: dict[str, Any] = {"decay": draft.decay}
        first, then = replace(first, aim=draft.aim), replace(then, aim=draft.aim, **decay)
        return with_draft(program, replace(draft, first=first, then=then))


class DraftHeadPass(DraftPass):
    """Base of drafters with heads over words.

    vocabulary: how many of the target's tokens they know; 0: all. A file of weights says itself
    which. Training chooses those that are most frequent in its text; untrained drafters have those
    of the lowest ids, which byte pair encodings learn first.
    """

    vocabulary: int = Field(default=8192, ge=0)

    def graft(self, program: Program, function: str, onto: Function | None = None) -> Graft:
        graft = super().graft(program, function, onto)
        name = self.name.removeprefix("draft_")
        graft.known = DraftVocabulary.of(graft.trained, graft.vocab, name, self.vocabulary)
        return graft
