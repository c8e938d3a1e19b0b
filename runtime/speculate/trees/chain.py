"""Chains, and what chains with siblings share with them: drawing the next tokens.

Greedy decoding knows one right token, so the best ones are drafted. Under sampling they are sampled
from the draft's distribution, warped as the target's is: of a best token only as much would be kept
as the target gives it. They are drawn by the target's own noise (see `noise`), or, where the plan's
verifier wants to know from what they were sampled (`Rejection`), by numbers of their own, and it is
told. A proposer without whole distributions proposes its best tokens there, too. Sources: Daliri et
al., "Coupling without Communication and Drafter-Invariant Speculative Decoding" (2024); Leviathan
et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023); siblings without
replacement: Jeon et al., "Recursive Speculative Decoding" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ....ir.plan import Chain
from ...asking.options import GenerationOptions
from ...feeding.draft import NO_DRAFT, Draft
from ..lengths.base import Flags, LengthPolicy
from ..level import Ids, Level
from ..noise import DraftNoise
from ..proposers.base import Proposer
from ..sampling import whole
from .base import TREES, TreePolicy, chances_of, goes_deeper
from .sampled import _distinct


@TREES.register(Chain)
class ChainPolicy(TreePolicy):
    """Each token is the best prediction after the one before, or sampled from it."""

    record: Chain

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        most = min(self.record.depth or max(depths), proposer.depth or max(depths))
        limits = [min(depth, most) for depth in depths]
        levels = list(grown(self, proposer, limits, length, 1))
        rows = np.concatenate([tokens for _, tokens, _ in levels], 1).tolist()
        given = [probs for _, _, probs in levels]
        return [
            _chain(row[:depth], given, index)
            for index, (row, depth) in enumerate(zip(rows, limits, strict=True))
        ]


def _chain(tokens: list[int], given: Sequence[torch.Tensor | None], index: int) -> Draft:
    """The draft of one sequence: its tokens up to the first that is none."""
    count = next((place for place, token in enumerate(tokens) if token < 0), len(tokens))
    if not count:
        return NO_DRAFT
    probs = [row[index] for row in given[:count] if row is not None]
    return Draft(tokens[:count], torch.stack(probs) if len(probs) == count else None)


def candidates(
    level: Level,
    wanted: Flags,
    count: int,
    options: GenerationOptions,
    noise: tuple[DraftNoise, int] | None = None,
) -> tuple[Ids, torch.Tensor | None]:
    """Up to `count` tokens that may follow each chain's last node, i64[B,K], -1 where there is
    none, and what those of each sequence were sampled from, f32[B,V]; None: they are the best ones,
    or drawn by `noise`.

    level: of one node a sequence. wanted: bool[B], the sequences whose tokens are read. noise: with
    the level's depth, from 1.
    """
    best: Ids = level.tokens[:, 0, :count]
    rows = np.flatnonzero(wanted & (best[:, 0] >= 0))
    if not options.do_sample or level.logits is None or not len(rows):
        return best, None
    chances = chances_of(level, (rows, 0), options)
    if noise is not None:
        raced: Ids = np.full((len(best), count), -1, dtype=np.int64)
        raced[rows] = noise[0].best(chances, rows.tolist(), noise[1], count)
        return raced, None
    places = _distinct(torch.from_numpy(chances.probs).double(), count, options.random()).numpy()
    known = places.clip(0)
    tokens = known if chances.ids is None else np.take_along_axis(chances.ids, known, 1)
    drawn: Ids = np.full((len(best), places.shape[1]), -1, dtype=np.int64)
    drawn[rows] = np.where(places < 0, -1, tokens)
    probs = whole(chances, level.logits.shape[-1])
    if len(rows) < len(best):
        probs = probs.new_zeros(len(best), probs.shape[1]).index_copy(
            0, torch.from_numpy(rows), probs
        )
    return drawn, probs


def grown(
    policy: TreePolicy, proposer: Proposer, limits: list[int], length: LengthPolicy, count: int
) -> Iterator[tuple[Level, Ids, torch.Tensor | None]]:
    """Level by level what a proposer says, and its `candidates`; the first of them are predicted
    further. limits: levels of each sequence at most; shortened where `length` has enough."""
    level, depth, options = proposer.root(count), 0, policy.options
    none_above = np.zeros((len(limits), 1), dtype=np.int64)
    while True:
        depth += 1
        noise = None if policy.noise is None else (policy.noise, depth)
        tokens, probs = candidates(level, np.array(limits) >= depth, count, options, noise)
        yield level, tokens, probs
        length.chose(tokens[:, 0])
        if not goes_deeper(length, level, depth, limits):
            return
        level = proposer.grow(tokens[:, :1], none_above, count)
