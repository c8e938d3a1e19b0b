"""Verification under sampling: speculative rejection, which keeps the target's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ....ir.plan import Lossless
from ...feeding.draft import Draft
from ..sampling import Array, Chances, StepToVerify
from .base import NOTHING_GAINED, SAMPLING, VERIFIERS, Verdict, Verifier


@VERIFIERS.register(Lossless, SAMPLING)
class RejectionVerifier(Verifier):
    """Accept draft token x with probability min(1, p(x)/q(x)), else go on with norm(max(p - q, 0)).

    p is the target's distribution after all the user's options, q the draft's. After a rejection
    the next sibling is tried against what is left of p; when none is left, a token is sampled from
    it. Of siblings that were sampled without replacement a rejected one leaves q too. A draft
    without `probs` is deterministic: q is 1 at x, so x is accepted with p(x), and else p(x) is
    zeroed and the rest renormalised. After a path that is accepted whole, one more token is sampled
    from p. Each token is distributed as the target's own sampling, whatever the draft. Sources:
    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Chen et
    al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023); siblings:
    Miao et al., "SpecInfer" (2024); without replacement: Jeon et al., "Recursive Speculative
    Decoding" (2024); without probabilities: Li et al., "EAGLE-2" (2024).
    """

    def verify(self, step: StepToVerify) -> list[Verdict]:
        drafts = step.drafts
        scores, owners = self.scorer.rows(step)
        chances = self.scorer.warp(scores)
        first = {index: row for row, (index, node) in enumerate(owners) if node < 0}
        self._weigh(chances, first, drafts)
        counts = [len(drafts[index].tokens) for index in first]
        # Nothing is drawn for an empty draft, so such a step draws what plain sampling does.
        # float64: a draft token may be less likely than float32's finest random number.
        draws = torch.empty(sum(counts), dtype=torch.float64)
        random = iter(draws.uniform_(generator=self.options.random()).split(counts))
        paths = {
            index: self._accepted(chances, row, drafts[index], next(random).tolist())
            for index, row in first.items()
        }
        ends = [first[i] + (path[-1] + 1 if path else 0) for i, path in paths.items()]
        last = chances.at(ends).draw(self.options.random())
        verdicts = [NOTHING_GAINED] * len(drafts)
        for (index, path), token in zip(paths.items(), last, strict=True):
            accepted = [drafts[index].tokens[node] for node in path]
            verdicts[index] = Verdict(path, [*accepted, token])
        return verdicts

    def _weigh(self, chances: Chances, first: Mapping[int, int], drafts: Sequence[Draft]) -> None:
        """Change in place what is to be decoded; `first` is the row of each sequence's root."""

    def _accepted(
        self, chances: Chances, root: int, draft: Draft, draws: Sequence[float]
    ) -> list[int]:
        """The accepted path; rows of `chances` lose what their rejected children had.

        Siblings that were sampled independently may be the same token: what follows any of them
        was sampled after the same text, and is judged together.
        """
        children, ends = draft.children(), [-1]
        while siblings := [node for end in ends for node in children.get(end, ())]:
            row = root + ends[0] + 1
            taken = self._first_taken(chances, row, draft, siblings, draws)
            if taken is None:
                taken = self._pardoned(draft, siblings)
            if taken is None:
                break
            twins = siblings if draft.independent else ()
            token = draft.tokens[taken]
            ends = [taken, *(n for n in twins if n != taken and draft.tokens[n] == token)]
        return draft.path(ends[0])

    def _pardoned(self, draft: Draft, siblings: Sequence[int]) -> int | None:
        """A sibling that is kept although all were rejected: none."""
        return None

    def _first_taken(
        self,
        chances: Chances,
        row: int,
        draft: Draft,
        siblings: Sequence[int],
        draws: Sequence[float],
    ) -> int | None:
        """The sibling that is accepted; if none is, the row becomes what is left of it."""
        given: Array | None = None
        for count, node in enumerate(siblings):
            token = draft.tokens[node]
            if draft.probs is not None and (count == 0 or draft.independent):
                given = draft.probs[node].numpy()
            likely = 1.0 if given is None else float(given[token])
            if draws[node] * likely < chances.of([row], [token])[0]:
                return node
            chances.subtract(row, token, given)
            if given is not None and not draft.independent and count + 1 < len(siblings):
                given = without(given, token)
        return None


def without(given: Array, token: int) -> Array:
    """What the next sibling was sampled from: q [V] without `token`, scaled to add up to 1."""
    rest = given.copy()
    rest[token] = 0
    total = rest.sum(dtype=np.float64)
    return rest / total if total > 0 else rest
