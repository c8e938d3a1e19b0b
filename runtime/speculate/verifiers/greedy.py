"""Greedy verification: keep the draft as long as it is what the target would say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ....ir import Program
from ....ir.plan import Lossless, Record
from ...asking.options import GenerationOptions
from ...feeding.draft import Draft
from ...feeding.outputs import integers
from ..sampling import StepToVerify, agreed, best
from .base import GREEDY, NOTHING_GAINED, VERIFIERS, Verdict, Verifier


@VERIFIERS.register(Lossless, GREEDY)
class GreedyVerifier(Verifier):
    """The longest path from the root on which the argmax agrees, plus the argmax after it.

    Takes the step's own ``argmax`` if it has one and no option reshapes the logits. Sources: Stern
    et al., "Blockwise Parallel Decoding" (2018); trees: Miao et al., "SpecInfer" (2024).

    argmax_suffices: False for a subclass that always needs whole logits.
    """

    argmax_suffices: ClassVar[bool] = True

    def __init__(
        self, record: Record, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.vocabulary = program.info.vocab_size
        self.scorer.best_only = self.argmax_suffices
        offered = "argmax" in program.step.outputs
        if self.argmax_suffices and offered and not options.reshapes_logits:
            self.fetch, self.takes_argmax = ("argmax",), True

    def verify(self, step: StepToVerify) -> list[Verdict]:
        return [
            NOTHING_GAINED if text.done else self._agreed(row, draft)
            for text, row, draft in zip(step.texts, self._choices(step), step.drafts, strict=True)
        ]

    def _choices(self, step: StepToVerify) -> list[list[int]]:
        """What the target would say after the root and each node of every sequence."""
        if "argmax" in step.outputs and "argmax" in self.fetch:
            return integers(step.outputs, "argmax")
        return self._from_logits(step)

    def _agreed(self, row: list[int], draft: Draft) -> Verdict:
        if draft.parents is not None:
            return self._verdict(row, draft, _branch(row, draft))
        count = agreed(draft.tokens, row, self.vocabulary)
        return Verdict(range(count), row[: count + 1])

    def _verdict(self, row: list[int], draft: Draft, path: Sequence[int]) -> Verdict:
        """The path and what the target says after it."""
        last = row[path[-1] + 1 if path else 0]
        agreed((), (last,), self.vocabulary)  # that it is a token
        return Verdict(path, [*(draft.tokens[node] for node in path), last])

    def _from_logits(self, step: StepToVerify) -> list[list[int]]:
        scores, owners = self._scored(step)
        choices: list[list[int]] = [[] for _ in step.texts]
        for (index, _), token in zip(owners, best(scores), strict=True):
            choices[index].append(token)
        return choices

    def _scored(self, step: StepToVerify) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """The scores that tokens are chosen by, see `Scorer.rows`."""
        return self.scorer.rows(step)


def _branch(row: list[int], draft: Draft) -> list[int]:
    """The nodes on the way down; parents come first, so one look at each node is enough."""
    assert draft.parents is not None
    path: list[int] = []
    at, wanted = -1, row[0]
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == at and token == wanted:
            path.append(node)
            at, wanted = node, row[node + 1]
    return path
