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


class _Nodes:
    """The nodes down to a depth in the tree's own order.

    order: the place of each where all are in order of their depths. parents: see `Draft`.
    """

    def __init__(self, tree: StaticTree, depth: int) -> None:
        by_depth = sorted(tree.paths, key=len)  # stable: as `_Depth` has the nodes of each
        places = {path: place for place, path in enumerate(by_depth)}
        paths = [path for path in tree.paths if len(path) <= depth]
        own = {(): -1} | {path: index for index, path in enumerate(paths)}
        self.order = np.array([places[path] for path in paths], dtype=np.intp)
        self.parents = tuple(own[path[:-1]] for path in paths)


@TREES.register(StaticTree)
class StaticTreePolicy(TreePolicy):
    """Node (0, 2, 1) is the second best after the third best after the best token.

    Source: Cai et al., "Medusa" (2024).
    """

    record: StaticTree

    def __init__(self, record: StaticTree, options: GenerationOptions = PLAIN) -> None:
        super().__init__(record, options)
        self.depths = [_Depth(record, depth) for depth in range(1, record.depth + 1)]
        self.trees = [_Nodes(record, depth) for depth in range(record.depth + 1)]

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
        whole = bool((every >= 0).all())
        return [self._draft(row, depth, whole) for row, depth in zip(every, limits, strict=True)]

    def _draft(self, tokens: Ids, depth: int, whole: bool) -> Draft:
        nodes = self.trees[depth]
        if not nodes.parents:
            return NO_DRAFT
        row = tokens[nodes.order].tolist()
        return Draft(row, None, nodes.parents) if whole else chosen(row, nodes.parents)


def _pick(level: Level, here: _Depth) -> Ids:
    """The tokens [B,N] of a depth's nodes; -1 where the proposer had too few candidates."""
    have = level.tokens.shape[-1]
    tokens = level.tokens[:, here.parent, np.minimum(here.rank, have - 1)]
    picked: Ids = np.where(here.rank < have, tokens, -1)
    return picked
