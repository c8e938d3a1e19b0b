"""A tree of tokens sampled from the proposer's own distributions.

Sources: siblings without replacement by Gumbel top-k: Jeon et al., "Recursive Speculative Decoding:
Accelerating LLM Inference via Sampling Without Replacement" (2024); with replacement: Sun et al.,
"SpecTr" (2023).

Distributions are warped by the user's temperature and filters, as the target's are, and handed to
the verifier. Greedy decoding draws the likeliest tokens, and hands on distributions only where the
plan asks for them (`SampledTree.told`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....ir import UnsupportedError
from ....ir.plan import SampledTree
from ...asking.options import GenerationOptions
from ...feeding.draft import NO_DRAFT, Draft
from ..lengths.base import Flags, LengthPolicy
from ..level import Ids, Level
from ..proposers.base import Proposer
from ..sampling import Chances, whole
from .base import PLAIN, TREES, TreePolicy, chances_of, goes_deeper


class _Sampled:
    """The nodes of one depth.

    tokens: i64[B,N], -1 for none. rows: i64[B,N], where in `spread` f32[R,V] the distribution is
    that a node was sampled from; None where nothing was sampled.
    """

    __slots__ = ("rows", "spread", "tokens")

    def __init__(
        self, tokens: Ids, rows: Ids | None = None, spread: torch.Tensor | None = None
    ) -> None:
        self.tokens, self.rows, self.spread = tokens, rows, spread


@TREES.register(SampledTree)
class SampledTreePolicy(TreePolicy):
    """Every node of a depth gets the same number of children. See the module docstring."""

    record: SampledTree

    def __init__(self, record: SampledTree, options: GenerationOptions = PLAIN) -> None:
        super().__init__(record, options)
        self.generator = options.random()
        self.parents: list[int] = []
        first = 0
        for size, width in zip((1, *record.sizes[:-1]), record.widths, strict=True):
            # A depth's parents are the `size` nodes just before it; before the first, the root: -1.
            above = range(first - size, first)
            self.parents += [parent for parent in above for _ in range(width)]
            first += size * width
        self.branches = max(record.widths) > 1
        self.ends = np.cumsum([0, *record.sizes]).tolist()

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        widths, batch = self.record.widths, len(depths)
        most = min(len(widths), proposer.depth or len(widths))
        limits = [min(depth, most) for depth in depths]
        levels: list[_Sampled] = []
        level = proposer.root(widths[0])
        above = np.zeros((batch, 1), dtype=np.int64)
        for number, width in enumerate(widths, 1):
            wanted = (above >= 0) & (np.array(limits) >= number)[:, None]
            levels.append(self._level(level, wanted, width))
            if not goes_deeper(length, level, number, limits):
                break
            places = np.arange(above.shape[1]).repeat(width)
            above = levels[-1].tokens
            level = proposer.grow(above, np.broadcast_to(places, above.shape), widths[number])
        return [self._draft(levels, index, depth) for index, depth in enumerate(limits)]

    def _level(self, level: Level, wanted: Flags, width: int) -> _Sampled:
        """`width` children of each wanted node [B,M], side by side."""
        if not self.options.do_sample:
            have = level.tokens[..., :width]
            tokens = np.full((*wanted.shape, width), -1, dtype=np.int64)
            tokens[..., : have.shape[-1]] = np.where(wanted[..., None], have, -1)
            rows, spread = self._said(level, wanted) if self.record.told else (None, None)
            every = None if rows is None else rows.repeat(width, axis=1)
            return _Sampled(tokens.reshape(len(wanted), -1), every, spread)
        self._require_logits(level)
        assert level.logits is not None
        # Of a node that the proposer says nothing after, the logits say nothing either.
        wanted = wanted & (level.tokens[..., 0] >= 0)
        tokens = np.full((*wanted.shape, width), -1, dtype=np.int64)
        rows = np.zeros(wanted.shape, dtype=np.int64)
        if not wanted.any():
            return _Sampled(tokens.reshape(len(wanted), -1))
        chances = chances_of(level, wanted, self.options)
        rows[wanted] = np.arange(len(chances.probs))
        tokens[wanted] = self._siblings(chances, width)
        spread = whole(chances, level.logits.shape[-1])
        return _Sampled(tokens.reshape(len(wanted), -1), rows.repeat(width, axis=1), spread)

    def _said(self, level: Level, wanted: Flags) -> tuple[Ids, torch.Tensor]:
        """The distributions of the wanted nodes, f32[R,V], and which is whose."""
        self._require_logits(level)
        assert level.logits is not None
        rows = np.zeros(wanted.shape, dtype=np.int64)
        rows[wanted] = np.arange(wanted.sum())
        return rows, torch.from_numpy(level.logits[wanted]).float().softmax(-1)

    def _require_logits(self, level: Level) -> None:
        if level.logits is None:
            raise UnsupportedError(
                f"tree={self.record} needs whole distributions, which this drafter does not "
                f"give: draft with another tree, such as static or best_first"
            )

    def _siblings(self, chances: Chances, width: int) -> Ids:
        """`width` samples a row [R,width]; -1 where a row has too few tokens."""
        probs = torch.from_numpy(chances.probs).double()
        if self.record.replacement:
            picked = _independent(probs, width, self.generator)
        else:
            picked = _distinct(probs, width, self.generator)
        places = picked.numpy()
        known = places.clip(0)
        tokens = known if chances.ids is None else np.take_along_axis(chances.ids, known, 1)
        found: Ids = np.full((len(places), width), -1, dtype=np.int64)
        found[:, : places.shape[1]] = np.where(places < 0, -1, tokens)
        return found

    def _draft(self, levels: Sequence[_Sampled], index: int, depth: int) -> Draft:
        size = self.ends[depth]
        if not size:
            return NO_DRAFT
        every = np.concatenate([level.tokens[index] for level in levels[:depth]])
        tokens, parents = every.tolist(), self.parents[:size]
        kept = list(range(size))
        if min(tokens) < 0:
            kept = [node for node in kept if tokens[node] >= 0]
            new = {-1: -1} | {node: place for place, node in enumerate(kept)}
            parents = [new[parents[node]] for node in kept]
            tokens = [tokens[node] for node in kept]
        if not tokens:
            return NO_DRAFT
        shape = tuple(parents) if self.branches else None
        probs = None
        if self.options.do_sample or self.record.told:
            probs = self._probs(levels, index, kept)
        return Draft(tokens, probs, shape, self.record.replacement)

    def _probs(self, levels: Sequence[_Sampled], index: int, kept: Sequence[int]) -> torch.Tensor:
        """What each kept node of a sequence was sampled from, f32[N,V]."""
        assert levels[0].spread is not None
        probs = torch.empty(len(kept), levels[0].spread.shape[-1])
        begin = 0
        for level, first, last in zip(levels, self.ends, self.ends[1:], strict=False):
            nodes = [node - first for node in kept if first <= node < last]
            if nodes and level.spread is not None and level.rows is not None:
                rows = torch.from_numpy(level.rows[index, nodes])
                torch.index_select(level.spread, 0, rows, out=probs[begin : begin + len(nodes)])
                begin += len(nodes)
        return probs


def _distinct(probs: torch.Tensor, count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Places [R,count] of candidates drawn one after the other without replacement; -1: none left.

    The largest p / e, with e exponentially distributed, in falling order: adding Gumbel noise to
    log p and taking the top is the same (Kool et al., "Stochastic Beams and Where to Find Them",
    2019).
    """
    race = probs / torch.empty_like(probs).exponential_(generator=generator)
    best = race.topk(min(count, probs.shape[-1]))
    return best.indices.masked_fill(best.values <= 0, -1)


def _independent(
    probs: torch.Tensor, count: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Places [R,count] of candidates drawn independently of each other."""
    reached = probs.cumsum(-1)
    points = torch.rand(len(probs), count, dtype=probs.dtype, generator=generator)
    places = torch.searchsorted(reached, points * reached[:, -1:], right=True)
    return places.clamp_max(probs.shape[-1] - 1)
