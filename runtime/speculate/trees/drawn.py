"""Trees whose tokens are sampled without replacement, of shapes other than a number a level.

Sources: Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding" (2024);
Xiong et al., "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure" (2024); Jeon
et al., "Recursive Speculative Decoding" (2024).

They are lossless because nothing but what was sampled before decides whether a node is there: not
its own token. Siblings stand in the order in which they were sampled, and the verifier is told
their parent's distribution.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....ir import UnsupportedError
from ....ir.plan import BestFirst, DynamicSample, SampledShape, StochasticBeam
from ...asking.options import GenerationOptions
from ...feeding.draft import NO_DRAFT, Draft
from ..lengths.base import Flags, LengthPolicy
from ..level import Ids, Level
from ..proposers.base import Proposer
from ..sampling import whole
from .base import PLAIN, TREES, TreePolicy, chances_of, goes_deeper
from .best_first import BestFirstPolicy
from .sampled import _distinct

Doubles = npt.NDArray[np.float64]


class Drawn(NamedTuple):
    """Children of M nodes, K of each, in the order in which they were sampled.

    tokens: i64[B,M,K], -1 for none. probs: f64[B,M,K], of each among its parent's. rows: i64[B,M],
    where in `spread` f32[R,V] the distribution of each parent is; None: nothing was sampled.
    """

    tokens: Ids
    probs: Doubles
    rows: Ids
    spread: torch.Tensor | None


class _Nodes(NamedTuple):
    """Nodes of one depth. tokens: i64[B,N], -1 for none. above: i64[B,N], which node of the depth
    above each follows. worth: f64[B,N], in falling order of which they become the draft. rows:
    i64[B,N], as in `Drawn`, with its spread."""

    tokens: Ids
    above: Ids
    worth: Doubles
    rows: Ids
    spread: torch.Tensor | None


class DrawnPolicy(TreePolicy):
    """Base of such trees.

    levels: at most. chosen: i64[B,E], which of a depth's nodes are expanded next.
    """

    levels: int
    chosen: Ids

    def __init__(self, record: Any, options: GenerationOptions = PLAIN) -> None:
        super().__init__(record, options)
        self.generator = options.random()

    @abstractmethod
    def level(self, level: Level, wanted: Flags, number: int) -> tuple[_Nodes, Ids, Ids]:
        """The nodes of depth `number`, of the wanted nodes [B,M] that were to be expanded; and what
        is to be expanded next: tokens and places in these M, i64[B,E]. In `above`, places in M."""

    def start(self, batch: int) -> None:
        """A new draft begins."""

    def width(self, number: int) -> int:
        """Candidates that a node of depth `number` - 1 is asked for."""
        return int(self.record.width)

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        most = min(self.levels, proposer.depth or self.levels)
        limits = [min(depth, most) for depth in depths]
        self.start(len(depths))
        found: list[_Nodes] = []
        expanded = np.zeros((len(depths), 1), dtype=np.int64)
        level = proposer.root(self.width(1))
        number, places = 1, np.full((len(depths), 1), -1, dtype=np.int64)
        while True:
            wanted = (expanded >= 0) & (np.array(limits) >= number)[:, None]
            nodes, expanded, parents = self.level(level, wanted, number)
            above = np.take_along_axis(places, nodes.above, 1)
            found.append(nodes._replace(above=above))
            if not goes_deeper(length, level, number, limits):
                break
            number += 1
            places = self.chosen
            level = proposer.grow(expanded, parents, self.width(number))
        return [self._draft(found[:depth], index) for index, depth in enumerate(limits)]

    def children(self, level: Level, wanted: Flags, count: int) -> Drawn:
        """Up to `count` children of each wanted node [B,M]."""
        if not self.options.do_sample:
            return self._best(level, wanted, count)
        if level.logits is None:
            raise UnsupportedError(
                f"tree={self.record} needs whole distributions, which this drafter does not "
                f"give: draft with another tree, such as static or best_first"
            )
        # Of a node that the proposer says nothing after, the logits say nothing either.
        wanted = wanted & (level.tokens[..., 0] >= 0)
        tokens = np.full((*wanted.shape, count), -1, dtype=np.int64)
        probs = np.zeros((*wanted.shape, count))
        rows = np.zeros(wanted.shape, dtype=np.int64)
        if not wanted.any():
            return Drawn(tokens, probs, rows, None)
        chances = chances_of(level, wanted, self.options)
        given = torch.from_numpy(chances.probs).double()
        places = _distinct(given, count, self.generator).numpy()
        known = places.clip(0)
        ids = known if chances.ids is None else np.take_along_axis(chances.ids, known, 1)
        size = places.shape[1]
        found = np.full((len(places), count), -1, dtype=np.int64)
        found[:, :size] = np.where(places < 0, -1, ids)
        likely = np.zeros((len(places), count))
        likely[:, :size] = np.where(places < 0, 0, np.take_along_axis(given.numpy(), known, 1))
        tokens[wanted], probs[wanted] = found, likely
        rows[wanted] = np.arange(len(places))
        return Drawn(tokens, probs, rows, whole(chances, level.logits.shape[-1]))

    def _best(self, level: Level, wanted: Flags, count: int) -> Drawn:
        """The likeliest children instead of sampled ones."""
        have = level.tokens[..., :count]
        tokens = np.full((*wanted.shape, count), -1, dtype=np.int64)
        tokens[..., : have.shape[-1]] = np.where(wanted[..., None], have, -1)
        probs = np.zeros(tokens.shape)
        scores = np.minimum(level.scores[..., :count], 0).astype(np.float64)
        probs[..., : have.shape[-1]] = np.exp(scores)
        return Drawn(tokens, np.where(tokens < 0, 0, probs), np.zeros(wanted.shape, int), None)

    def _draft(self, levels: Sequence[_Nodes], index: int) -> Draft:
        """One sequence's draft: its nodes in falling order of worth, parents first."""
        entries: list[tuple[float, int, int, int]] = []  # worth, depth, place, parent's entry
        before: dict[int, int] = {-1: -1}
        for depth, nodes in enumerate(levels):
            here: dict[int, int] = {}
            rows = zip(
                nodes.tokens[index].tolist(),
                nodes.above[index].tolist(),
                nodes.worth[index].tolist(),
                strict=True,
            )
            for place, (token, above, worth) in enumerate(rows):
                if token >= 0 and above in before and worth > -np.inf:
                    here[place] = len(entries)
                    entries.append((worth, depth, place, before[above]))
            before = here
        # Stable, and a parent and an earlier sibling are worth no less: they stay before.
        order = sorted(range(len(entries)), key=lambda entry: -entries[entry][0])
        order = order[: self.record.most]
        if not order:
            return NO_DRAFT
        new = {-1: -1} | {entry: node for node, entry in enumerate(order)}
        tokens = [int(levels[entries[e][1]].tokens[index, entries[e][2]]) for e in order]
        parents = tuple(new[entries[e][3]] for e in order)
        probs = self._probs(levels, index, [entries[e][1:3] for e in order])
        return Draft(tokens, probs, parents)

    def _probs(
        self, levels: Sequence[_Nodes], index: int, nodes: Sequence[tuple[int, int]]
    ) -> torch.Tensor | None:
        """What each node was sampled from, f32[N,V]."""
        if not self.options.do_sample:
            return None
        rows = []
        for depth, place in nodes:
            spread = levels[depth].spread
            assert spread is not None
            rows.append(spread[int(levels[depth].rows[index, place])])
        return torch.stack(rows)


def _best_places(worth: Doubles, count: int) -> Ids:
    """Places [B,count] of the largest of [B,N], the first ones at ties; -1 where there are fewer or
    they are -inf."""
    order = np.argsort(-worth, axis=1, kind="stable")[:, :count]
    places = np.full((len(worth), count), -1, dtype=np.int64)
    kept = np.take_along_axis(worth, order, 1)
    places[:, : order.shape[1]] = np.where(np.isneginf(kept), -1, order)
    return places


def _taken(values: npt.NDArray[Any], places: Ids, without: float) -> npt.NDArray[Any]:
    """Values [B,N] at places [B,E]; `without` where there is none."""
    found = np.take_along_axis(values, places.clip(0), 1)
    return np.where(places < 0, without, found)


@TREES.register(SampledShape)
class SampledShapePolicy(DrawnPolicy):
    """Node (0, 2) is the third sample after the first one after the text."""

    record: SampledShape

    def __init__(self, record: SampledShape, options: GenerationOptions = PLAIN) -> None:
        super().__init__(record, options)
        place = {path: number for number, path in enumerate(record.paths)}
        inner = {path[:-1] for path in record.paths}
        self.levels = max(map(len, record.paths))
        self.depths = []
        parents: list[tuple[int, ...]] = [()]
        for depth in range(1, self.levels + 1):
            paths = [path for path in record.paths if len(path) == depth]
            above = np.array([parents.index(path[:-1]) for path in paths])
            ranks = np.array([path[-1] for path in paths])
            worth = -np.array([place[path] for path in paths], dtype=np.float64)
            parents = [path for path in paths if path in inner]
            expanded = np.array([paths.index(path) for path in parents], dtype=np.int64)
            self.depths.append((above, ranks, worth, expanded))

    def width(self, number: int) -> int:
        return int(self.depths[number - 1][1].max()) + 1

    def level(self, level: Level, wanted: Flags, number: int) -> tuple[_Nodes, Ids, Ids]:
        above, ranks, worth, expanded = self.depths[number - 1]
        drawn = self.children(level, wanted, self.width(number))
        tokens, shape = drawn.tokens[:, above, ranks], (len(wanted), len(above))
        nodes = _Nodes(
            tokens,
            np.broadcast_to(above, shape),
            np.broadcast_to(worth, shape),
            drawn.rows[:, above],
            drawn.spread,
        )
        self.chosen = np.broadcast_to(expanded, (len(wanted), len(expanded)))
        return nodes, tokens[:, expanded], np.broadcast_to(above[expanded], self.chosen.shape)


@TREES.register(DynamicSample)
class DynamicSamplePolicy(DrawnPolicy):
    """Places in order of the chance that verification comes to them."""

    record: DynamicSample

    def __init__(self, record: DynamicSample, options: GenerationOptions = PLAIN) -> None:
        super().__init__(record, options)
        self.levels = record.depth
        best = BestFirst(record.nodes, record.depth, record.width)
        self.greedy = None if options.do_sample else BestFirstPolicy(best, options)

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        if self.greedy is not None:
            return self.greedy.grow(proposer, depths, length)
        return super().grow(proposer, depths, length)

    def start(self, batch: int) -> None:
        self.given = np.zeros((batch, 1))

    def level(self, level: Level, wanted: Flags, number: int) -> tuple[_Nodes, Ids, Ids]:
        width = self.record.width
        drawn = self.children(level, wanted, width)
        # What earlier siblings left: a place is worth that, whatever token comes to it.
        left = np.maximum(1 - np.cumsum(drawn.probs, -1) + drawn.probs, 1e-300)
        places = self.given[:, :, None] + np.log(left)
        with np.errstate(divide="ignore"):
            tokens_worth = self.given[:, :, None] + np.log(drawn.probs)
        batch = len(wanted)
        count = wanted.shape[1]
        above = np.broadcast_to(np.arange(count).repeat(width), (batch, count * width))
        tokens = drawn.tokens.reshape(batch, -1)
        none = tokens < 0
        worth = np.where(none, -np.inf, places.reshape(batch, -1))
        rows = np.take_along_axis(drawn.rows, above, 1)
        nodes = _Nodes(tokens, above, worth, rows, drawn.spread)
        reached = np.where(none, -np.inf, tokens_worth.reshape(batch, -1))
        chosen = _best_places(reached, width)
        self.given = _taken(reached, chosen, -np.inf)
        self.chosen = chosen.clip(0)
        return nodes, _taken(tokens, chosen, -1), self.chosen // width


@TREES.register(StochasticBeam)
class StochasticBeamPolicy(DrawnPolicy):
    """Stochastic beam search; see `StochasticBeam`."""

    record: StochasticBeam

    def __init__(self, record: StochasticBeam, options: GenerationOptions = PLAIN) -> None:
        super().__init__(record, options)
        self.levels = record.depth

    def start(self, batch: int) -> None:
        self.likely, self.noisy = np.zeros((batch, 1)), np.zeros((batch, 1))

    def level(self, level: Level, wanted: Flags, number: int) -> tuple[_Nodes, Ids, Ids]:
        width = self.record.width
        drawn = self.children(level, wanted, width)
        with np.errstate(divide="ignore"):
            likely = self.likely[:, :, None] + np.log(drawn.probs)
        noisy = likely
        if self.options.do_sample:
            noisy = self._perturbed(drawn)
        batch, count = wanted.shape
        above = np.broadcast_to(np.arange(count).repeat(width), (batch, count * width))
        tokens, scores = drawn.tokens.reshape(batch, -1), noisy.reshape(batch, -1)
        kept = _best_places(np.where(tokens < 0, -np.inf, scores), width)
        # Children of one node stay in the order in which they were sampled: their scores fall.
        tokens = _taken(tokens, kept, -1)
        parents = np.take_along_axis(above, kept.clip(0), 1)
        rows = np.take_along_axis(drawn.rows, parents, 1)
        # Levels one after the other; within one the best first.
        worth = np.broadcast_to(-float(number) * width - np.arange(width), tokens.shape)
        self.likely = _taken(likely.reshape(batch, -1), kept, -np.inf)
        self.noisy = _taken(scores, kept, -np.inf)
        self.chosen = np.broadcast_to(np.arange(width), tokens.shape)
        return _Nodes(tokens, parents, worth, rows, drawn.spread), tokens, parents

    def _perturbed(self, drawn: Drawn) -> Doubles:
        """Scores f64[B,M,K] of children in the order in which they were sampled without
        replacement: the largest is their parent's, the others follow downwards.

        With e ~ Exp(1) scaled by what is left, -log of the arrival times of a race: the first
        sample's score is the parent's own, and each further one adds an exponential time at the
        rate of what earlier samples left, which is how Gumbel noise on all children falls in order.
        """
        times = torch.empty(drawn.probs.shape, dtype=torch.float64)
        waits = times.exponential_(generator=self.generator).numpy()
        left = 1 - np.cumsum(drawn.probs, -1) + drawn.probs
        rate = np.exp(self.likely)[:, :, None] * np.maximum(left, 1e-300)
        steps = waits / np.maximum(rate, 1e-300)
        steps[..., 0] = np.exp(-self.noisy)  # the parent's score is the best child's
        with np.errstate(divide="ignore", over="ignore"):
            scores: Doubles = -np.log(np.cumsum(steps, -1))
        return scores
