"""Verifiers that keep some drafts as they are, whatever the target would have written."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from ....ir import Program
from ...asking.options import GenerationOptions
from ..sampling import StepToVerify
from .base import Verdict, Verifier


class Keeping(Verifier):
    """Mixed into an ordinary verifier, before it. A token that the call's own options rule out is
    kept in no draft."""

    beyond: ClassVar[int] = 1  # no token of the target's follows a draft

    def __init__(
        self, record: Any, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.scorer.best_only = False  # drafts hold tokens that are not the target's best

    @abstractmethod
    def ordinary(self, step: StepToVerify) -> list[Verdict]:
        """Verdicts where drafts are not kept as they are."""

    @abstractmethod
    def keeps(self, step: StepToVerify, index: int) -> bool:
        """Whether a sequence's draft is."""

    def verify(self, step: StepToVerify) -> list[Verdict]:
        verdicts = self.ordinary(step)
        ruled_out = self._ruled_out(step)
        for index, (text, draft) in enumerate(zip(step.texts, step.drafts, strict=True)):
            if text.done or not draft.tokens or index in ruled_out:
                continue
            if self.keeps(step, index):
                # The last token stands where the target's own stands else: its row comes next.
                verdicts[index] = Verdict(range(len(draft.tokens) - 1), list(draft.tokens))
        return verdicts

    def _ruled_out(self, step: StepToVerify) -> set[int]:
        """Sequences with a draft token that the call's own options rule out."""
        if not (self.scorer.records or any(text.processors for text in step.texts)):
            return set()
        self.scorer.rows(step)
        return {index for index, _ in self.scorer.dead}
