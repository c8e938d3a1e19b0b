"""Verification under sampling: speculative rejection, which keeps the target's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...ir import Program
from ...ir.plan import Lossless
from ..drafters.base import Draft
from ..options import GenerationOptions
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
        last = chances[[first[index] + count for index, count in kept.items()]]
        for row, (index, count) in enumerate(kept.items()):
            if count < len(drafts[index].tokens):
                last[row] = _residual(last[row], drafts[index], count)
        sampled = torch.multinomial(last, 1, generator=self.generator)[:, 0].tolist()
        new: list[list[int]] = [[] for _ in texts]
        for (index, count), token in zip(kept.items(), sampled, strict=True):
            new[index] = [*drafts[index].tokens[:count], token]
        return new

    def _accept(
        self, chances: torch.Tensor, first: Mapping[int, int], drafts: Sequence[Draft]
    ) -> dict[int, int]:
        """How many draft tokens each sequence keeps."""
        drawn = sum(len(drafts[index].tokens) for index in first)
        if drawn == 0:
            return dict.fromkeys(first, 0)
        # float64: a draft token may be less likely than float32's finest random number.
        draws = iter(torch.rand(drawn, dtype=torch.float64, generator=self.generator).tolist())
        kept = {}
        for index, row in first.items():
            tokens, probs = drafts[index].tokens, drafts[index].probs
            depths = torch.arange(len(tokens))
            target = chances[row + depths, list(tokens)].tolist()
            given = [1.0] * len(tokens) if probs is None else probs[depths, list(tokens)].tolist()
            passed = [next(draws) * q < p for p, q in zip(target, given, strict=True)]
            kept[index] = passed.index(False) if False in passed else len(tokens)
        return kept


def _residual(chances: torch.Tensor, draft: Draft, rejected: int) -> torch.Tensor:
    """norm(max(p - q, 0)) [V] after the draft token number `rejected` was rejected."""
    rest = chances.clone()
    if draft.probs is None:
        rest[draft.tokens[rejected]] = 0.0
    else:
        rest = (rest - draft.probs[rejected]).clamp_(min=0.0)
    total = rest.sum()
    # Nothing is left only if p = q up to rounding; then p itself is the distribution.
    return rest / total if float(total) > 0.0 else chances
