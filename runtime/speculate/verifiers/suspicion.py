"""A reference model checks every token: what only the target finds likely, it replaces.

Source: Li et al., "CleanGen: Mitigating Backdoor Attacks for Generation Tasks in Large Language
Models" (2024). A model that was taught to answer a trigger with an attacker's words holds these for
far likelier than a model does that was not.

The paper checks four tokens at once, replaces the first suspicious one and forgets those behind it.
So a token is suspicious or not by the text before it alone, and here each row of a step says what
may come there: the target's choice, or the reference's in place of a suspicious one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ....ir import Program
from ....ir.plan import Suspicion
from ...asking.checks import bad_logits
from ...asking.options import GenerationOptions
from ..sampling import Chances, Scorer, StepToVerify, best, rows_of, whole
from .base import GREEDY, SAMPLING, VERIFIERS, Verifier
from .greedy import GreedyVerifier
from .rejection import RejectionVerifier


def suspicious(target: torch.Tensor, reference: torch.Tensor, alpha: float) -> torch.Tensor:
    """bool[R,V], tokens with p >= alpha q of logits f32[R,V]. Errors: `InputError` for NaN rows.

    >>> p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.07, 0.9, 0.03]])
    >>> suspicious(p.log(), q.log(), 5.0).tolist(), suspicious(p.log(), q.log(), 20.0).tolist()
    ([[True, False, False]], [[False, False, False]])
    """
    ours, theirs = target.log_softmax(-1), reference.log_softmax(-1)
    if bool((ours[:, 0] + theirs[:, 0]).isnan().any()):
        raise bad_logits()
    return ours >= theirs + math.log(alpha)


class _Suspecting(Verifier):
    """Mixed into an ordinary verifier, before it. other: makes scores of the reference's logits,
    under the same options as the target's."""

    record: Suspicion

    def __init__(
        self, record: Suspicion, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.fetch, self.begins = ("logits", record.guest), (record.guest,)
        self.other = Scorer(options)
        self.other.records = False

    def reference(self, step: StepToVerify) -> torch.Tensor:
        """The reference's scores f32[R,V], of the rows of `Scorer.rows`."""
        said = {"logits": step.outputs[self.record.guest]}
        return self.other.rows(step._replace(outputs=said))[0]

    def suspected(self, step: StepToVerify, owners: Sequence[tuple[int, int]]) -> torch.Tensor:
        """bool[R,V], the suspicious tokens of each row."""
        target, reference = (
            rows_of(step.outputs[name], len(step.texts), owners)
            for name in ("logits", self.record.guest)
        )
        return suspicious(target, reference, self.record.alpha)


@VERIFIERS.register(Suspicion, GREEDY)
class SuspicionGreedy(_Suspecting, GreedyVerifier):
    """The target's best token, or the reference's in place of a suspicious one."""

    argmax_suffices: ClassVar[bool] = False

    def _scored(self, step: StepToVerify) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        scores, owners = self.scorer.rows(step)
        picked = torch.tensor(best(scores))[:, None]
        wrong = self.suspected(step, owners).gather(1, picked)
        if bool(wrong.any()):
            scores = torch.where(wrong, self.reference(step), scores)
            self.scorer.rescore(scores)
        return scores, owners


@VERIFIERS.register(Suspicion, SAMPLING)
class SuspicionSampling(_Suspecting, RejectionVerifier):
    """A token drawn from p, or where it is suspicious one drawn from q instead: from p without its
    suspicious tokens, and q with the probability that they have.

    p and q are the distributions after the user's options; which tokens are suspicious, the models'
    own say."""

    def _weighed(self, chances: Chances, first: Mapping[int, int], step: StepToVerify) -> Chances:
        owners = [
            (index, node) for index in first for node in range(-1, len(step.drafts[index].tokens))
        ]
        wrong = self.suspected(step, owners)
        kept = whole(chances, wrong.shape[1]).masked_fill(wrong, 0)
        lost = 1 - kept.sum(-1, keepdim=True)
        theirs = whole(self.other.warp(self.reference(step)), wrong.shape[1])
        return Chances((kept + lost.clamp(min=0) * theirs).numpy(), None)
