"""Verification under sampling: tokens drawn by place, and speculative rejection; both keep the
target's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....ir import Program
from ....ir.plan import Lossless, Rejection
from ...asking.options import GenerationOptions
from ...feeding.draft import Draft
from ..noise import Noise
from ..sampling import Array, Chances, StepToVerify
from .base import GREEDY, NOTHING_GAINED, SAMPLING, VERIFIERS, Verdict, Verifier
from .greedy import GreedyVerifier

VERIFIERS.register(Rejection, GREEDY)(GreedyVerifier)


@VERIFIERS.register(Rejection, SAMPLING)
@VERIFIERS.register(Lossless, SAMPLING)
class RejectionVerifier(Verifier):
    """Draw each token from p by the noise of its place, and keep the children that have it; of a
    draft that says what it was sampled from, q, accept token x with probability min(1, p(x)/q(x)),
    else go on with norm(max(p - q, 0)).

    p is the target's distribution after all the user's options. A draft without `probs` was not
    sampled, or by the same noise (see `noise`): the text is the same, for one seed, whatever was
    drafted. What was not sampled is kept with p(x), as by rejection. With `probs`, after a
    rejection the next sibling is tried against what is left of p; when none is left, a token is
    drawn from it. Of siblings that were sampled without replacement a rejected one leaves q too.
    After a path that is accepted whole, one more token is drawn from p. Each token is distributed
    as the target's own sampling, whatever the draft. Sources: Daliri et al., "Coupling without
    Communication and Drafter-Invariant Speculative Decoding" (2024); rejection: Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding" (2023);
    Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023);
    siblings: Miao et al., "SpecInfer" (2024); without replacement: Jeon et al., "Recursive
    Speculative Decoding" (2024); without probabilities: Li et al., "EAGLE-2" (2024).
    """

    def __init__(
        self, record: Any, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.noise: Noise = Noise(options.random())

    def verify(self, step: StepToVerify) -> list[Verdict]:
        drafts = step.drafts
        scores, owners = self.scorer.rows(step)
        chances = self.scorer.warp(scores)
        first = {index: row for row, (index, node) in enumerate(owners) if node < 0}
        chances = self._weighed(chances, first, step)
        verdicts = [NOTHING_GAINED] * len(drafts)
        for index, root in first.items():
            where = index, step.texts[index].generated
            verdicts[index] = self._walked(chances, root, drafts[index], where)
        return verdicts

    def _walked(self, chances: Chances, root: int, draft: Draft, where: tuple[int, int]) -> Verdict:
        """The verdict on a draft. where: its text, and the place there of its first token. Rows of
        `chances` lose what their rejected children had.

        Siblings that were sampled independently may be the same token: what follows any of them
        was sampled after the same text, and is judged together.
        """
        sampled, (text, place) = draft.probs is not None, where
        # float64: a draft token may be less likely than float32's finest random number.
        draws = torch.empty(len(draft.tokens) if sampled else 0, dtype=torch.float64)
        random = draws.uniform_(generator=self.options.random()).tolist()
        children, ends, gained = draft.children(), [-1], list[int]()
        while True:
            siblings = [node for end in ends for node in children.get(end, ())]
            row, token = root + ends[0] + 1, -1
            taken = self._first_taken(chances, row, draft, siblings, random) if sampled else None
            if taken is None:
                token = self.noise.winner(chances, row, text, place + len(gained))
                if not sampled:
                    taken = next((node for node in siblings if draft.tokens[node] == token), None)
            if taken is None and siblings:
                taken = self._pardoned(draft, siblings)
            if taken is None:
                return Verdict(draft.path(ends[0]), [*gained, token])
            kept = draft.tokens[taken]
            gained.append(kept)
            twins = siblings if draft.independent else ()
            ends = [taken, *(n for n in twins if n != taken and draft.tokens[n] == kept)]

    def _weighed(self, chances: Chances, first: Mapping[int, int], step: StepToVerify) -> Chances:
        """What is to be decoded instead of the target's distributions, which may be changed in
        place: here these. first: the row of each sequence's root."""
        return chances

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
        """The sampled sibling that is accepted; if none is, the row becomes what is left of it."""
        assert draft.probs is not None
        for count, node in enumerate(siblings):
            token = draft.tokens[node]
            if count == 0 or draft.independent:
                given = draft.probs[node].numpy()
            if draws[node] * float(given[token]) < chances.of([row], [token])[0]:
                return node
            chances.subtract(row, given)
            if not draft.independent and count + 1 < len(siblings):
                given = without(given, token)
        return None


def without(given: Array, token: int) -> Array:
    """What the next sibling was sampled from: q [V] without `token`, scaled to add up to 1."""
    rest = given.copy()
    rest[token] = 0
    total = rest.sum(dtype=np.float64)
    return rest / total if total > 0 else rest
