"""Verification under sampling: speculative rejection, which keeps the target's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...ir import Program
from ...ir.plan import Lossless
from ..drafters.base import Draft
from ..options import GenerationOptions
from ..sampling import Chances
from ..text import Text
from .base import SAMPLING, VERIFIERS, Verifier


@VERIFIERS.register(Lossless, SAMPLING)
class RejectionVerifier(Verifier):
    """Accept draft token x with probability min(1, p(x)/q(x)), else sample norm(max(p - q, 0)).

    p is the target's distribution after all the user's options, q the draft's. A draft without
    `probs` is deterministic: q is 1 at x, so x is accepted with p(x), and else p(x) is zeroed and
    the rest renormalised. After a draft that is accepted whole, one more token is sampled from p.
    Each token is distributed as the target's own sampling, whatever the draft. Sources: Leviathan
    et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Chen et al.,
    "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).
    """

    def __init__(
        self, record: Lossless, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.generator = options.random()

    def verify(
        self, outputs: Mapping[str, torch.Tensor], texts: Sequence[Text], drafts: Sequence[Draft]
    ) -> list[list[int]]:
        """See `Verifier.verify`."""
        scores, owners = self.scorer.rows(outputs, texts, drafts)
        chances = self.scorer.warp(scores)
        first = {index: row for row, (index, depth) in enumerate(owners) if depth == 0}
        kept = self._accept(chances, first, drafts)
        last = chances.at([first[index] + count for index, count in kept.items()])
        for row, (index, count) in enumerate(kept.items()):
            if count < len(drafts[index].tokens):
                last.subtract(row, drafts[index], count)
        new: list[list[int]] = [[] for _ in texts]
        for (index, count), token in zip(kept.items(), last.draw(self.generator), strict=True):
            new[index] = [*drafts[index].tokens[:count], token]
        return new

    def _accept(
        self, chances: Chances, first: Mapping[int, int], drafts: Sequence[Draft]
    ) -> dict[int, int]:
        """How many draft tokens each sequence keeps."""
        tokens = [token for index in first for token in drafts[index].tokens]
        if not tokens:
            return dict.fromkeys(first, 0)
        rows = [row + i for index, row in first.items() for i in range(len(drafts[index].tokens))]
        target = iter(chances.of(rows, tokens))
        # float64: a draft token may be less likely than float32's finest random number.
        draws = iter(
            torch.rand(len(tokens), dtype=torch.float64, generator=self.generator).tolist()
        )
        kept = {}
        for index in first:
            passed = [next(draws) * q < next(target) for q in _given(drafts[index])]
            kept[index] = passed.index(False) if False in passed else len(passed)
        return kept


def _given(draft: Draft) -> list[float]:
    """Probability q of each draft token under the distribution that it was sampled from."""
    if draft.probs is None:
        return [1.0] * len(draft.tokens)
    every = torch.arange(len(draft.tokens))
    return draft.probs[every, list(draft.tokens)].tolist()
