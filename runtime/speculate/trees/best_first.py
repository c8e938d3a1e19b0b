"""The likeliest nodes of this step's predictions: another tree every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....ir.plan import BestFirst
from ...feeding.draft import NO_DRAFT, Draft
from ..lengths.base import LengthPolicy
from ..level import Ids, Level, Scores
from ..proposers.base import Proposer
from .base import TREES, TreePolicy, goes_deeper

NEVER = np.float32(-np.inf)


class Pool:
    """Every candidate seen so far, N a sequence, level after level.

    tokens: i64[B,N]. worth: f32[B,N], log probability of the path down to each; -inf where there is
    no token. parents: i64[B,N], places in the pool, -1 for the root. depths: i64[N]. The frontier,
    M nodes of the last level, is what the next level follows: places i64[B,M] and their worth.
    """

    def __init__(self, batch: int) -> None:
        self.tokens = np.empty((batch, 0), dtype=np.int64)
        self.worth = np.empty((batch, 0), dtype=np.float32)
        self.parents = np.empty((batch, 0), dtype=np.int64)
        self.depths = np.empty(0, dtype=np.int64)
        self.places = np.full((batch, 1), -1, dtype=np.int64)
        self.given = np.zeros((batch, 1), dtype=np.float32)

    def add(self, level: Level, depth: int) -> None:
        """A level's candidates, which follow the frontier."""
        batch, width, count = level.tokens.shape
        # A path is never likelier than its beginning, whatever scores a proposer makes up.
        scores = np.where(level.tokens < 0, NEVER, np.minimum(level.scores, 0))
        worth = (self.given[:, :, None] + scores).reshape(batch, -1)
        self.tokens = np.concatenate([self.tokens, level.tokens.reshape(batch, -1)], 1)
        self.worth = np.concatenate([self.worth, worth], 1)
        self.parents = np.concatenate([self.parents, self.places.repeat(count, 1)], 1)
        self.depths = np.concatenate([self.depths, np.full(width * count, depth)])

    def expand(self, width: int) -> tuple[Ids, Ids]:
        """Make the best `width` nodes of the last level the frontier; what `Proposer.grow` takes.

        Always `width` nodes, so that whatever predicts sees one shape; -1 where there are fewer.
        """
        begin = int(np.searchsorted(self.depths, self.depths[-1]))
        count = (len(self.depths) - begin) // self.places.shape[1]
        last = self.worth[:, begin:]
        best = np.argsort(-last, axis=1, kind="stable")[:, :width]
        found = best.shape[1]
        if found < width:
            best = np.concatenate([best, best[:, :1].repeat(width - found, 1)], 1)
        self.places = best + begin
        self.given = np.take_along_axis(last, best, 1)
        self.given[:, found:] = NEVER
        tokens = np.take_along_axis(self.tokens, self.places, 1)
        tokens[np.isneginf(self.given)] = -1
        return tokens, best // count

    def best(self, nodes: int, depths: Sequence[int]) -> tuple[Ids, Scores]:
        """Places and worth of the best nodes within each sequence's depth, the best first."""
        beyond = self.depths > np.asarray(depths)[:, None]
        worth = np.where(beyond, NEVER, self.worth)
        order = np.argsort(-worth, axis=1, kind="stable")[:, :nodes]
        return order, np.take_along_axis(worth, order, 1)


@TREES.register(BestFirst)
class BestFirstPolicy(TreePolicy):
    """Nodes in order of worth, so that a draft that is cut keeps the best ones.

    A child is worth at most as much as its parent and comes after it in the pool, so a stable order
    by worth puts parents first, and the best nodes form a tree. Sources: Li et al., "EAGLE-2"
    (2024); the options that stop early: Wang et al., "OPT-Tree" (2025), and Xiong et al., "DySpec"
    (2024).
    """

    record: BestFirst

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        record = self.record
        most = min(record.depth, proposer.depth or record.depth)
        limits = [min(depth, most) for depth in depths]
        pool, depth, before = Pool(len(depths)), 1, np.zeros(len(depths), dtype=np.float32)
        level = proposer.root(record.width)
        pool.add(level, depth)
        while goes_deeper(length, level, depth, limits):
            after = self._expected(pool, limits)
            if record.gain and (after - before < record.gain).all():
                break
            before = after
            level = proposer.grow(*pool.expand(record.width), record.width)
            depth += 1
            pool.add(level, depth)
        return self._drafts(pool, limits)

    def _expected(self, pool: Pool, depths: Sequence[int]) -> Scores:
        """Accepted tokens that each sequence's tree is worth, f32[B]; only if it matters."""
        if not self.record.gain:
            return np.zeros(len(depths), dtype=np.float32)
        worth = pool.best(self.record.nodes, depths)[1]
        expected: Scores = np.exp(worth).sum(1)
        return expected

    def _drafts(self, pool: Pool, depths: Sequence[int]) -> list[Draft]:
        order, worth = pool.best(self.record.nodes, depths)
        tokens = np.take_along_axis(pool.tokens, order, 1)
        # The last column stays -1: it is where the root's place, -1, looks itself up.
        places = np.full((len(order), pool.tokens.shape[1] + 1), -1)
        np.put_along_axis(places, order, np.arange(order.shape[1])[None], 1)
        above = np.take_along_axis(pool.parents, order, 1)
        parents = np.take_along_axis(places, above, 1)
        least = np.log(self.record.least) if self.record.least else NEVER
        counts = ((worth > NEVER) & (worth >= least)).sum(1).tolist()
        return [
            Draft(row[:count], None, tuple(up[:count])) if count else NO_DRAFT
            for row, up, count in zip(tokens.tolist(), parents.tolist(), counts, strict=True)
        ]
