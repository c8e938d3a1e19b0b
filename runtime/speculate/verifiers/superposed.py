"""Verification of superposed drafts: nothing is verified; the drafts of a row grow by a token."""

from __future__ import annotations

import torch

from ....ir.plan import Lossless
from ...asking.request import Request
from ...asking.superposed import Superposition
from ..sampling import StepToVerify
from .base import NOTHING_GAINED, SUPERPOSED, VERIFIERS, Verdict, Verifier


@VERIFIERS.register(Lossless, SUPERPOSED)
class SuperposedVerifier(Verifier):
    """Each row's text goes on with the likeliest draft, and the others are mixed into it."""

    search: Superposition

    def begin(self, request: Request) -> None:
        assert isinstance(request.search, Superposition)
        self.search = request.search

    def verify(self, step: StepToVerify) -> list[Verdict]:
        found = []
        for index, text in enumerate(step.texts):
            if text.done:
                found.append(NOTHING_GAINED)
                continue
            logits = step.outputs["logits"][index, 0].to("cpu", torch.float32)
            if self.search.advance(index, self.search.scores(index, logits)):
                found.append(Verdict((), [self.search.going[index][0].tokens[-1]]))
            else:
                text.done, text.mixture = True, ()
                found.append(NOTHING_GAINED)
        return found
