"""Segments to leave out of drafts are searched for while decoding, on the text's own last tokens.

Source: Xia et al., "SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration"
(2024): random search, with a Bayesian suggestion now and then, for the set whose predictions match
most of the tokens that the target has generated last.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ....ir.plan import SkippingDraft, policy
from ....ir.plan.bounds import Levels, Nodes, Seed, Share
from ....runtime.feeding.feed import StepFeed
from ....runtime.memo import learnt
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.skipping import FETCH, SkippingProposer
from ....runtime.speculate.setting import Setting


@policy
@dataclass(frozen=True)
class SearchedSkippingDraft(SkippingDraft):
    """The target's layers without those that are found by search not to matter (SWIFT, Xia 2024).

    While decoding, other choices of segments are tried on the text's own last tokens: one that
    predicts more of them than the choice in use takes its place. Most are drawn by chance, and
    every `guided`-th where a Gaussian process over the earlier ones expects most. share: of the
    segments that hold nothing of the first nor the last layer, how many are left out. levels:
    tokens drafted at most. window: tokens that a choice is tried on. period: steps from one try to
    the next. tries: before the search ends; enough: the share of tokens predicted that ends it,
    too. seed: of the choices that are drawn. What was found is kept as long as the model is. A
    batch leaves out the same ones.
    """

    window: Nodes = 32
    period: Levels = 1
    tries: Nodes = 100
    guided: Levels = 25
    enough: Share = 0.95
    seed: Seed = 0
    kind: ClassVar[str] = "searched_skipping"


POOL = 64
"""Choices among which a suggestion is looked for."""

KAPPA = 2.5
"""Deviations above the mean that a suggestion is judged by."""

NOISE = 1e-2
"""Variance of a score on one window, next to that of all choices."""


class Search:
    """What was tried with an executable; it outlives a generation.

    tried: scores by choice, of places that are left out. best: the one in use, with its score.
    """

    def __init__(self, record: SearchedSkippingDraft, inner: Sequence[int], count: int) -> None:
        self.record, self.inner, self.count = record, inner, count
        self.random = random.Random(record.seed)
        self.tried: dict[tuple[int, ...], float] = {}
        self.best: tuple[tuple[int, ...], float] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more is tried."""
        enough = self.best is not None and self.best[1] >= self.record.enough
        return enough or len(self.tried) >= self.record.tries

    def next(self) -> tuple[int, ...] | None:
        """What to try; None if all that was drawn has been tried."""
        pool = sorted({self._drawn() for _ in range(POOL)} - self.tried.keys())
        if not pool:
            return None
        if not self.tried or (len(self.tried) + 1) % self.record.guided:
            return self.random.choice(pool)
        best = promise(self._marks(list(self.tried)), self._scores(), self._marks(pool))
        return pool[best]

    def learn(self, choice: tuple[int, ...], score: float) -> None:
        """What a choice scored."""
        self.tried[choice] = score
        if self.best is None or score > self.best[1]:
            self.best = choice, score

    def _drawn(self) -> tuple[int, ...]:
        return tuple(sorted(self.random.sample(self.inner, self.count)))

    def _scores(self) -> torch.Tensor:
        return torch.tensor(list(self.tried.values()), dtype=torch.float64)

    def _marks(self, choices: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """f64[N,places], 1 where a place is left out."""
        rows = [[float(place in choice) for place in self.inner] for choice in choices]
        return torch.tensor(rows, dtype=torch.float64)


def promise(known: torch.Tensor, scores: torch.Tensor, new: torch.Tensor) -> int:
    """Which of `new` f64[M,P] has the highest upper confidence bound (mean and `KAPPA` deviations)
    under a Gaussian process over what `known` f64[N,P] scored, f64[N]; its kernel falls with the
    squared distance next to the places.
    """
    mean, scale = scores.mean(), scores.std(unbiased=False).clamp(min=1e-6)
    within = _kernel(known, known) + NOISE * torch.eye(len(known), dtype=known.dtype)
    root = torch.linalg.cholesky(within)
    across = _kernel(known, new)
    weights = torch.cholesky_solve(((scores - mean) / scale)[:, None], root)
    spread = torch.linalg.solve_triangular(root, across, upper=False).square().sum(0)
    return int(((across.T @ weights)[:, 0] + KAPPA * (1 - spread).clamp(min=0).sqrt()).argmax())


def _kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.exp(-4 * torch.cdist(a, b).square() / a.shape[1])


@PROPOSERS.register(SearchedSkippingDraft)
class SearchedSkippingProposer(SkippingProposer):
    """search: what is known so far."""

    record: SearchedSkippingDraft

    def __init__(self, record: SearchedSkippingDraft, setting: Setting) -> None:
        super().__init__(record, setting, record.period)
        searches: dict[SearchedSkippingDraft, Search] = learnt(self.executable, Search)
        self.search = searches.setdefault(record, Search(record, self.inner, self.count))
        self._use()

    def chosen(self) -> list[int]:
        """Try another choice, if the search is not over and there is text to try it on."""
        window = self.record.window
        counts = {
            b: min(window, text.generated - 1, text.rows)
            for b, text in enumerate(self.texts)
            if not text.done and text.generated > 1 and text.rows
        }
        if self.search.over or sum(counts.values()) < window:
            return self.kept
        if self.search.best is None:
            self.search.learn(self._skipped(), self._score(self.kept, counts))
        choice = self.search.next()
        if choice is not None:
            self.search.learn(choice, self._score(self.without(choice), counts))
        self._use()
        return self.kept

    def _use(self) -> None:
        if self.search.best is not None:
            self.kept = self.without(self.search.best[0])

    def _skipped(self) -> tuple[int, ...]:
        return tuple(place for place in self.inner if place not in self.kept)

    def _score(self, kept: Sequence[int], counts: dict[int, int]) -> float:
        """The share of the last tokens that these segments predict."""
        texts = self.texts
        parts = (*(self.parts[place] for place in kept), self.head)
        rows = [text.tokens[-1 - counts.get(b, 0) : -1] for b, text in enumerate(texts)]
        with self.borrowed(counts) as past:
            starts = [text.position - counts.get(b, 0) for b, text in enumerate(texts)]
            starts = [start if b in counts else 0 for b, start in enumerate(starts)]
            outputs = self.feeder.run_parts(parts, StepFeed(rows, past, starts, FETCH), FETCH)
            said = outputs["logits"].argmax(-1).tolist()
        hits: list[bool] = [
            a == b
            for index, count in counts.items()
            for a, b in zip(said[index][:count], texts[index].tokens[-count:], strict=True)
        ]
        return sum(hits) / len(hits)
