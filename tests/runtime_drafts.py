"""A proposer for the runtime's tests: another rule says what it predicts, and how well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graftwork.ir.plan import DraftRecord
from graftwork.runtime.feeding.draft import VerifiedStep
from graftwork.runtime.speculate.level import Level
from graftwork.runtime.speculate.proposers.base import PROPOSERS, Proposer


@dataclass(frozen=True)
class RuleDraft(DraftRecord):
    """Candidates are the best tokens under `rule(tokens so far) -> logits`.

    Tokens at -inf are no candidates. said: whether the proposer shows its logits. levels: how deep
    it can look.
    """

    rule: Callable[[tuple[int, ...]], torch.Tensor] = lambda seen: torch.zeros(2)
    said: bool = True
    levels: int | None = None
    kind: ClassVar[str] = "test_rule"
    grows: ClassVar[bool] = True


@PROPOSERS.register(RuleDraft)
class RuleProposer(Proposer):
    """Keeps the tokens before every node that the draft may grow from."""

    record: RuleDraft

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self.vocabulary = self.executable.program.info.vocab_size

    def observe(self, taken: VerifiedStep) -> None:
        for text, tokens in zip(self.texts, taken.tokens, strict=True):
            text += tokens

    def root(self, count: int) -> Level:
        self.nodes: list[list[Any]] = [[tuple(text)] for text in self.texts]
        return self._level(count)

    def grow(self, tokens: Any, parents: Any, count: int) -> Level:
        assert tokens.shape == parents.shape and tokens.shape[0] == len(self.nodes)
        self.nodes = [
            [
                None if token < 0 or before[parent] is None else (*before[parent], token)
                for token, parent in zip(row, above, strict=True)
            ]
            for row, above, before in zip(
                tokens.tolist(), parents.tolist(), self.nodes, strict=True
            )
        ]
        return self._level(count)

    def _level(self, count: int) -> Level:
        # Nodes without a token may get anything: NaN shows whoever looks.
        nothing = torch.full((self.vocabulary,), torch.nan)
        logits = torch.stack(
            [
                torch.stack([nothing if n is None else self.record.rule(n) for n in row])
                for row in self.nodes
            ]
        )
        best = logits.nan_to_num(-torch.inf).topk(min(count, self.vocabulary))
        tokens = best.indices.masked_fill(best.values.isneginf(), -1)
        shown = logits if self.record.said else None
        return Level(tokens.numpy(), best.values.numpy(), None if shown is None else shown.numpy())


def ranked(
    answer: Callable[[tuple[int, ...]], int | None],
    rank: Callable[[tuple[int, ...]], int],
    vocab: int,
    candidates: int | None = None,
) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """A rule that puts the answer at a rank (0: first; beyond the candidates: not at all).

    candidates: how many tokens come into question; the others are at -inf. Where there is no
    answer, nothing comes into question.
    """
    most = vocab if candidates is None else candidates

    def rule(seen: tuple[int, ...]) -> torch.Tensor:
        logits = torch.full((vocab,), -torch.inf)
        right, place = answer(seen), rank(seen)
        if right is None:
            return logits
        order = [token for token in range(vocab) if token != right]
        if place < most:
            order.insert(place, right)
        for index, token in enumerate(order[:most]):
            logits[token] = -float(index)
        return logits

    return rule


def digest(seen: Sequence[int], salt: int = 0) -> int:
    """A number that any change of the tokens changes."""
    found = salt
    for token in seen:
        found = (found * 1000003 + token + 1) % (2**61 - 1)
    return found
