"""Proposers, programs and results of steps for tests of tree and length policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from graftwork.ir.plan import DecodePlan, DraftRecord
from graftwork.runtime.feeding.draft import Draft, VerifiedStep
from graftwork.runtime.speculate.level import Level
from graftwork.runtime.speculate.proposers.base import Proposer


@dataclass(frozen=True)
class FakeDraft(DraftRecord):
    """A draft of `size` tokens."""

    size: int = 10

    @property
    def most(self) -> int:
        return self.size


def executable(most: int) -> Any:
    """Stands for an executable whose plan drafts `most` tokens."""

    class Executable:
        program = SimpleNamespace(plan=DecodePlan(draft=FakeDraft(most)))

    return Executable()


class RuleProposer(Proposer):
    """Candidates that depend on the whole path: `rule(sequence, path) -> [(token, score)]`.

    Checks what a tree policy asks for: shapes, and parents among the nodes of the call before.
    """

    def __init__(self, rule: Any, batch: int, depth: int | None = None) -> None:
        self.rule, self.batch, self.depth = rule, batch, depth
        self.calls: list[tuple[int, int]] = []

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing to keep."""

    def observe(self, taken: VerifiedStep) -> None:
        """Nothing to learn."""

    def root(self, count: int) -> Level:
        self.paths: list[list[tuple[int, ...]]] = [[()] for _ in range(self.batch)]
        return self._level(count)

    def grow(self, tokens: np.ndarray, parents: np.ndarray, count: int) -> Level:
        assert tokens.shape == parents.shape and tokens.shape[0] == self.batch
        self.paths = [
            [(*self.paths[b][parents[b, m]], int(tokens[b, m])) for m in range(tokens.shape[1])]
            for b in range(self.batch)
        ]
        return self._level(count)

    def _level(self, count: int) -> Level:
        width = len(self.paths[0])
        self.calls.append((width, count))
        tokens = np.full((self.batch, width, count), -1, dtype=np.int64)
        scores = np.zeros((self.batch, width, count), dtype=np.float32)
        for b, paths in enumerate(self.paths):
            for m, path in enumerate(paths):
                found = [] if -1 in path else self.rule(b, path)[:count]
                for k, (token, score) in enumerate(found):
                    tokens[b, m, k], scores[b, m, k] = token, score
        return Level(tokens, scores)


def random_rule(vocab: int, most: int, seed: int) -> Any:
    """Up to `most` candidates with falling log probabilities, different after every path."""

    def rule(sequence: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        rng = np.random.default_rng([seed, sequence, *path])
        count = int(rng.integers(0, most + 1))
        tokens = rng.permutation(vocab)[:count]
        # Coarse, so that ties are common.
        probs = np.sort(rng.integers(1, 5, size=count))[::-1] / (4 * count + 1)
        return list(zip(tokens.tolist(), np.log(probs).tolist(), strict=True))

    return rule


def taken(drafts: Sequence[Draft], paths: Sequence[Sequence[int]]) -> VerifiedStep:
    """What a step came to that accepted these paths, in sequences that all go on."""
    tokens = [[*(d.tokens[n] for n in p), 0] for d, p in zip(drafts, paths, strict=True)]
    return VerifiedStep(drafts, paths, tokens, [0] * len(drafts), {})
