"""The same tree every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....ir.plan import StaticTree
from ....ir.plan.shapes import Path
from ...asking.options import GenerationOptions
from ...feeding.draft import NO_DRAFT, Draft
from ..lengths.base import LengthPolicy
from ..level import Ids, Level
from ..proposers.base import Proposer
from .base import PLAIN, TREES, TreePolicy, chosen, goes_deeper


class _Depth:
    """The nodes of one depth, as index arrays into the level before.

    parent: for each node the place of its parent among the nodes that were expanded; rank: its rank
    among its siblings; expanded: which of the nodes have children.
    """

    def __init__(self, tree: StaticTree, depth: int) -> None:
        paths = [path for path in tree.paths if len(path) == depth]
        inner = {path[:-1] for path in tree.paths}
        above: tuple[Path, ...] = ((), *tree.paths)
        before = [path for path in above if len(path) == depth - 1 and path in inner]
        self.parent = np.array([before.index(path[:-1]) for path in paths])
        self.rank = np.array([path[-1] for path in paths])
        self.expanded = np.array(
            [i for i, path in enumerate(paths) if path in inner], dtype=np.intp
        )
        below = [path[-1] for path in tree.paths if len(path) == depth]
        self.most = 1 + max(below)


@TREES.register(StaticTree)
class StaticTreePolicy(TreePolicy):
    """Node (0, 2, 1) is the second best after the third best after the best token.

    Source: Cai et al., "Medusa" (2024).
    """

    record: StaticTree

    def __init__(self, record: StaticTree, options: GenerationOptions = PLAIN) -> None:
        super().__init__(record, options)
        self.depths = [_Depth(record, depth) for depth in range(1, record.depth + 1)]
        place = {(): -1} | {path: index for index, path in enumerate(record.paths)}
        self.parents = tuple(place[path[:-1]] for path in record.paths)
        self.sizes = np.cumsum([0, *record.widths]).tolist()

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        most = min(len(self.depths), proposer.depth or len(self.depths))
        limits = [min(depth, most) for depth in depths]
        columns: list[Ids] = []
        level = proposer.root(self.depths[0].most)
        for number, here in enumerate(self.depths, 1):
            tokens = _pick(level, here)
            columns.append(tokens)
            if not goes_deeper(length, level, number, limits):
                break
            batch = (len(depths), len(here.expanded))
            parents = np.broadcast_to(here.parent[here.expanded], batch)
            level = proposer.grow(tokens[:, here.expanded], parents, self.depths[number].most)
        every = np.concatenate(columns, 1)
        rows, whole = every.tolist(), bool((every >= 0).all())
        return [self._draft(row, depth, whole) for row, depth in zip(rows, limits, strict=True)]

    def _draft(self, tokens: list[int], depth: int, whole: bool) -> Draft:
        size = self.sizes[depth]
        if not size:
            return NO_DRAFT
        if whole:
            return Draft(tokens[:size], None, self.parents[:size])
        return chosen(tokens[:size], self.parents[:size])


def _pick(level: Level, here: _Depth) -> Ids:
    """The tokens [B,N] of a depth's nodes; -1 where the proposer had too few candidates."""
    have = level.tokens.shape[-1]
    tokens = level.tokens[:, here.parent, np.minimum(here.rank, have - 1)]
    picked: Ids = np.where(here.rank < have, tokens, -1)
    return picked
