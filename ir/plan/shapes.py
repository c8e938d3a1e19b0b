"""Which tree to draw: the most accepted tokens that a number of nodes can buy."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Path: TypeAlias = tuple[int, ...]
"""A node: its ranks among siblings, from the root."""


def best_paths(accepted: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The tree of `nodes` nodes with the largest expected number of accepted tokens.

    accepted[d][r]: probability that, its parent being accepted, the candidate of rank r at depth
    d + 1 is. A node's worth is the product along its path, never more than its parent's, so the
    most valuable nodes form a tree and taking them in order is optimal. Sources: Chen et al.,
    "Sequoia" (2024); Wang et al., "OPT-Tree" (2025).

    >>> best_paths([[0.6, 0.3], [0.5, 0.4]], 4)
    [(0,), (0, 0), (1,), (0, 1)]
    """
    # Candidates of each depth by falling rate: a drafter's second may be right more often.
    orders = [sorted(range(len(rates)), key=lambda r: -rates[r]) for rates in accepted]
    heap: list[tuple[float, Path, int]] = []

    def offer(above: Path, worth: float, place: int) -> None:
        depth = len(above)
        if depth == len(orders) or place == len(orders[depth]):
            return
        rank = orders[depth][place]
        if accepted[depth][rank] > 0:
            heapq.heappush(heap, (-worth * accepted[depth][rank], (*above, rank), place))

    worths: dict[Path, float] = {(): 1.0}
    offer((), 1.0, 0)
    while heap and len(worths) <= nodes:
        negative, path, place = heapq.heappop(heap)
        worths[path] = -negative
        offer(path, -negative, 0)
        offer(path[:-1], worths[path[:-1]], place + 1)
    return [path for path in worths if path]


def expected(paths: Iterable[Path], accepted: Sequence[Sequence[float]]) -> float:
    """Tokens that a step with a tree yields on average, the bonus token included. paths: its nodes,
    parents first."""
    worth: dict[Path, float] = {(): 1.0}
    for path in paths:
        worth[path] = worth[path[:-1]] * accepted[len(path) - 1][path[-1]]
    return sum(worth.values())
