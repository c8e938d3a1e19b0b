"""What passes that insert trained weights have in common, and those of them that draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ...ir import Program
from ...ir.plan import CachedDraft, ContinuedDraft, LearningDraft
from ...ir.plan.bounds import Aim, Factor, Nodes
from ..engine.base import STATES, Contract, Effect, Outcome, Pass, PassDefinitionError
from .plan_edits import with_draft
from .trained import TrainedWeights, as_published


class TrainedPass(Pass):
    """Base of passes that insert weights which somebody trains. `insert` does it; a file of weights
    is used whole or refused, and weights that nobody trained are remarked.

    weights: a file of trained weights, or the folder that training wrote; empty: untrained ones.
    unread: names in published files that may stay unread, because they repeat the target's.
    """

    weights: str = ""

    unread: ClassVar[tuple[str, ...]] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The weights, where some are given."""
        return (self.weights,) if self.weights else ()

    def run(self, program: Program) -> Outcome:
        """Insert the weights. Errors: `PassError` naming a tensor of the file that has no place."""
        outcome = self.insert(program)
        if not self.weights:
            remark = (
                "its weights are untrained and know nothing: train them (graftwork train, or "
                f"graftwork.fit), then set {self.name}.weights"
            )
            return replace(outcome, remarks=(*outcome.remarks, remark))
        given = TrainedWeights(self.weights, self.name, program, self.published)
        given.check_all_used(self.trained(program, outcome.program), self.unread)
        return outcome

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

    weights: see `TrainedPass`. candidates: best tokens that a draft function returns. decay: in
    training, a level's loss weighs decay to the power of its depth. aim: in training, what is asked
    of drafts: the text's tokens, the target's distribution, or both (see `Aim`); as in the paper
    unless said.
    """

    candidates: Nodes = 10
    decay: Factor = 0.8
    aim: Aim = "text"

    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN, Effect.FUNCTIONS})
    reads: ClassVar[frozenset[Effect]] = STATES

    def continued(
        self, program: Program, first: CachedDraft, then: LearningDraft, **training: Any
    ) -> Program:
        """The program with a drafter of two parts, of which `then` goes on where `first` stops.
        training: what `ContinuedDraft` says of it."""
        given: dict[str, Any] = {"decay": self.decay, "trained": bool(self.weights), **training}
        first, then = replace(first, aim=self.aim), replace(then, aim=self.aim)
        return with_draft(program, ContinuedDraft(first, then, aim=self.aim, **given))
