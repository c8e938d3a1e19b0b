"""Verification of beams: nothing is drafted; the search decides how all texts go on."""

from __future__ import annotations

import torch

from ....ir.plan import Lossless
from ...asking.beams import Search
from ...asking.checks import bad_logits
from ...asking.request import Request
from ..sampling import Scorer, StepToVerify
from .base import BEAMS, NOTHING_GAINED, VERIFIERS, Verdict, Verifier


class BeamScorer(Scorer):
    """Scores are log probabilities before processors see them, as in transformers."""

    def scaled(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.log_softmax(-1)


@VERIFIERS.register(Lossless, BEAMS)
class BeamVerifier(Verifier):
    """Each text goes on from the one that the search says, by the token that it says."""

    search: Search

    def begin(self, request: Request) -> None:
        assert request.beams is not None
        self.search, self.scorer = request.beams, BeamScorer(self.options)

    def verify(self, step: StepToVerify) -> list[Verdict]:
        self.scorer.ids.clear()  # texts have changed places
        self.scorer.hopeless = self.search.hopeless
        scores, owners = self.scorer.rows(step)
        if bool(scores.isnan().any()):
            raise bad_logits()
        whole = scores.new_zeros(len(step.texts), scores.shape[-1])
        whole[[index for index, _ in owners]] = scores
        taken = self.search.advance(whole)
        self.parents = taken.parents
        verdicts = [Verdict((), [token]) for token in taken.tokens]
        for index, text in enumerate(step.texts):
            over = taken.done[index // self.search.width]
            if over and not text.done and self.scorer.records:
                self.scorer.record(index, text, [-1])
            text.done = over
            if over:
                verdicts[index] = NOTHING_GAINED
        return verdicts
