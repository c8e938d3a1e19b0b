"""Which tree to draw: the most accepted tokens that a number of nodes can buy."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .tree import Path, StaticTree


def best_tree(accepted: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree of `nodes` nodes with the largest expected number of accepted tokens.

    accepted[d][r]: probability that, its parent being accepted, the candidate of rank r at depth
    d + 1 is. A node's worth is the product along its path, never more than its parent's, so the
    most valuable nodes form a tree and taking them in order is optimal. Sources: Chen et al.,
    "Sequoia" (2024); Wang et al., "OPT-Tree" (2025).

    >>> best_tree([[0.6, 0.3], [0.5, 0.4]], 4).paths
    ((0,), (1,), (0, 0), (0, 1))
    """
    heap: list[tuple[float, Path]] = [(-accepted[0][0], (0,))]
    chosen: list[Path] = []
    while heap and len(chosen) < nodes:
        worth, path = heapq.heappop(heap)
        chosen.append(path)
        rates = accepted[len(path) - 1]
        if path[-1] + 1 < len(rates) and rates[path[-1]] > 0:
            heapq.heappush(heap, (worth / rates[path[-1]] * rates[path[-1] + 1], _next(path)))
        if len(path) < len(accepted) and worth < 0:
            heapq.heappush(heap, (worth * accepted[len(path)][0], (*path, 0)))
    return StaticTree.of(chosen)


def expected(tree: StaticTree, accepted: Sequence[Sequence[float]]) -> float:
    """Tokens that a step with this tree yields on average, the bonus token included."""
    worth: dict[Path, float] = {(): 1.0}
    for path in tree.paths:
        worth[path] = worth[path[:-1]] * accepted[len(path) - 1][path[-1]]
    return sum(worth.values())


def _next(path: Path) -> Path:
    return (*path[:-1], path[-1] + 1)
