"""Contrastive decoding at the price of speculation: the drafter is the weak model.

Source: Yuan et al., "Speculative Contrastive Decoding" (2024); the plausibility bound: Li et al.,
"Contrastive Decoding: Open-ended Text Generation as Optimization" (2023).

What a weak model finds likely, too, is often what both get wrong: generic or repeated text. So the
target's distribution p is sharpened against the drafter's q: p^(1 + beta) / q^beta, among tokens
that the target holds for plausible. Drafts are verified against that as against p. What q is after
a node the draft says where the node has children. So a step ends with the token behind the last
such node, as in the paper, where the drafter runs once more for it: the deepest tokens of a draft
are there for q. p itself is decoded where nothing was drafted: a text's first token is the
target's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch

from ....ir import UnsupportedError
from ....ir.plan import Contrastive
from ...asking.checks import bad_logits
from ...feeding.draft import Draft
from ..sampling import Array, Chances, StepToVerify, best
from .base import GREEDY, SAMPLING, VERIFIERS, Verdict, Verifier
from .greedy import GreedyVerifier
from .rejection import RejectionVerifier


def contrasted(record: Contrastive, wanted: Array, weak: Array) -> Array:
    """p^(1 + beta) / q^beta of p = `wanted` [K] and q = `weak` [K], adding up to 1.

    Where the drafter never says a token (q is 0 after a filter) it counts as its least likely one.

    >>> strong, weak = np.array([0.5, 0.4, 0.1]), np.array([0.8, 0.1, 0.1])
    >>> contrasted(Contrastive(1.0, 0.1), strong, weak).round(3).tolist()
    [0.155, 0.795, 0.05]
    """
    if record.beta == 0:
        return wanted
    known = weak[weak > 0]
    floor = known.min() if len(known) else 1.0
    # Logarithms: powers of small probabilities underflow.
    with np.errstate(divide="ignore"):
        scores = (1 + record.beta) * np.log(wanted.astype(np.float64))
    scores -= record.beta * np.log(np.maximum(weak, floor).astype(np.float64))
    scores[wanted < record.plausible * wanted.max()] = -np.inf
    raised = np.exp(scores - scores.max())
    shares: Array = (raised / raised.sum()).astype(wanted.dtype)
    return shares


def weak_rows(first: int, draft: Draft) -> list[tuple[int, Array]]:
    """Rows of one sequence, whose root's is `first`, and the drafter's distribution [V] there."""
    if draft.tokens and draft.probs is None:
        raise UnsupportedError(
            "verify=contrastive weighs the target against the drafter's distribution, which this "
            "draft does not come with: use a drafter that predicts, not one that copies, and the "
            "passes tree_sampled and verify_contrastive"
        )
    if draft.probs is None:
        return []
    # Siblings come from one distribution; the first one's is as it was before any was taken out.
    families = draft.children().items()
    return [(first + parent + 1, draft.probs[nodes[0]].numpy()) for parent, nodes in families]


def known(verdict: Verdict, draft: Draft) -> Verdict:
    """A verdict without the token that follows a node which has no children: q is not known there.

    >>> chain = Draft([7, 8])
    >>> known(Verdict([0, 1], [7, 8, 9]), chain), known(Verdict([0], [7, 9]), chain)
    (Verdict(path=[0], tokens=[7, 8]), Verdict(path=[0], tokens=[7, 9]))
    """
    path, tokens = verdict
    if not path or path[-1] in draft.children():
        return verdict
    return Verdict(path[:-1], tokens[:-1])


class _Contrasting(Verifier):
    """Mixed into an ordinary verifier, before it: a step ends where q is known."""

    record: Contrastive
    beyond: ClassVar[int] = 1

    def verify(self, step: StepToVerify) -> list[Verdict]:
        verdicts = super().verify(step)  # type: ignore[safe-super]
        return list(map(known, verdicts, step.drafts))


@VERIFIERS.register(Contrastive, SAMPLING)
class ContrastiveSampling(_Contrasting, RejectionVerifier):
    """Speculative rejection that keeps the contrasted distribution instead of the target's."""

    def _weighed(self, chances: Chances, first: Mapping[int, int], step: StepToVerify) -> Chances:
        for index, root in first.items():
            for row, weak in weak_rows(root, step.drafts[index]):
                wanted = chances.probs[row]
                chances.replace(row, contrasted(self.record, wanted, chances.among(row, weak)))
        return chances


@VERIFIERS.register(Contrastive, GREEDY)
class ContrastiveGreedy(_Contrasting, GreedyVerifier):
    """The best token of the contrasted distribution, wherever the drafter's is known."""

    argmax_suffices: ClassVar[bool] = False

    def _from_logits(self, step: StepToVerify) -> list[list[int]]:
        scores, owners = self.scorer.rows(step)
        picked = best(scores)
        choices: list[list[int]] = [[] for _ in step.texts]
        for row, (index, node) in enumerate(owners):
            if node < 0:
                for weighed, weak in weak_rows(row, step.drafts[index]):
                    picked[weighed] = self._best(scores[weighed], weak)
            choices[index].append(picked[row])
        return choices

    def _best(self, scores: torch.Tensor, weak: Array) -> int:
        probs = scores.softmax(-1).numpy()
        if np.isnan(probs[0]):
            raise bad_logits()
        return int(contrasted(self.record, probs, weak).argmax())
