"""Greedy verification: keep the draft as long as it is what the target would say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...ir import Program
from ...ir.plan import Lossless
from ..drafters.base import Draft
from ..options import GenerationOptions
from ..sampling import bad_logits, best
from ..text import Text
from .base import GREEDY, VERIFIERS, Verifier


@VERIFIERS.register(Lossless, GREEDY)
class GreedyVerifier(Verifier):
    """The longest prefix on which the argmax agrees, plus the argmax after it.

    Takes the step's own ``argmax`` if it has one and no option reshapes the logits.
    Source: Stern et al., "Blockwise Parallel Decoding" (2018).
    """

    def __init__(
        self, record: Lossless, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.vocabulary = program.info.vocab_size
        if "argmax" in program.function("step").outputs and not options.reshapes_logits:
            self.fetch = ("argmax",)

    def verify(
        self, outputs: Mapping[str, torch.Tensor], texts: Sequence[Text], drafts: Sequence[Draft]
    ) -> list[list[int]]:
        """See `Verifier.verify`."""
        if "argmax" in outputs and "argmax" in self.fetch:
            choices: list[list[int]] = outputs["argmax"].tolist()
        else:
            choices = self._from_logits(outputs, texts, drafts)
        return [
            [] if text.done else self._agreed(row, draft.tokens)
            for text, row, draft in zip(texts, choices, drafts, strict=True)
        ]

    def _agreed(self, row: list[int], tokens: Sequence[int]) -> list[int]:
        count = 0
        for token in tokens:
            if token != row[count]:
                break
            count += 1
        # A draft token is a valid id, so only the last one can be an argmax of nothing.
        if not 0 <= row[count] < self.vocabulary:
            raise bad_logits()
        return row[: count + 1]

    def _from_logits(
        self, outputs: Mapping[str, torch.Tensor], texts: Sequence[Text], drafts: Sequence[Draft]
    ) -> list[list[int]]:
        scores, owners = self.scorer.rows(outputs, texts, drafts)
        choices: list[list[int]] = [[] for _ in texts]
        for (index, _), token in zip(owners, best(scores), strict=True):
            choices[index].append(token)
        return choices
