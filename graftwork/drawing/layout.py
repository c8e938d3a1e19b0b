"""A layered drawing of a small acyclic graph: ranks from top to bottom, few crossings.

Sugiyama et al., Methods for Visual Understanding of Hierarchical System Structures (1981): ranks by
longest paths, points of long edges as vertices of their own, orders by barycentres, and positions
that pull vertices over their neighbours. Plain lists, for the hundred vertices of a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

GAP = 18.0
"""Pixels between neighbours in a rank."""
SWEEPS = 12

Edge = tuple[Hashable, Hashable]


@dataclass(frozen=True)
class Placed:
    """Where everything is, in pixels. at: centre and top of every vertex. through: where an
    edge passes the rows between its ends: x, and the row's top and bottom. width, height: of
    all."""

    at: Mapping[Hashable, tuple[float, float]]
    through: Mapping[Edge, Sequence[tuple[float, float, float]]]
    width: float
    height: float


def layout(sizes: Mapping[Any, tuple[float, float]], edges: Sequence[Edge], step: float) -> Placed:
    """Place vertices of these widths and heights. The keys' order is topological, and every edge
    leads forward in it. step: pixels between ranks."""
    ranks = _ranks(list(sizes), edges)
    rows, links, points = _with_points(ranks, edges)
    width = {**{point: 4.0 for path in points.values() for point in path}}
    width |= {vertex: size[0] for vertex, size in sizes.items()}
    _order(rows, links)
    x = _positions(rows, links, width)
    tops, heights, y = [], [], 0.0
    for row in rows:
        tops.append(y)
        heights.append(max((sizes[v][1] for v in row if v in sizes), default=0.0))
        y += heights[-1] + step
    left = min((x[v] - width[v] / 2 for v in x), default=0.0)
    right = max((x[v] + width[v] / 2 for v in x), default=0.0)
    at = {vertex: (x[vertex] - left, tops[rank]) for vertex, rank in ranks.items()}
    rank_of = {vertex: rank for rank, row in enumerate(rows) for vertex in row}
    spans = [(top, top + height) for top, height in zip(tops, heights, strict=True)]
    through = {
        edge: [(x[point] - left, *spans[rank_of[point]]) for point in path]
        for edge, path in points.items()
    }
    return Placed(at, through, right - left, max(y - step, 0.0))


def _ranks(vertices: Sequence[Hashable], edges: Sequence[Edge]) -> dict[Hashable, int]:
    """Ranks by longest paths from the top; then sources stand right above what reads them."""
    into, out = defaultdict(list), defaultdict(list)
    for a, b in edges:
        into[b].append(a)
        out[a].append(b)
    ranks: dict[Hashable, int] = {}
    for vertex in vertices:
        ranks[vertex] = max((ranks[a] + 1 for a in into[vertex]), default=0)
    for vertex in reversed(vertices):
        if out[vertex] and not into[vertex]:
            ranks[vertex] = min(ranks[b] for b in out[vertex]) - 1
    return ranks


def _with_points(
    ranks: Mapping[Hashable, int], edges: Sequence[Edge]
) -> tuple[list[list[Hashable]], list[Edge], dict[Edge, list[Hashable]]]:
    """Rows of vertices and of points of long edges; edges between neighbouring rows."""
    rows: list[list[Hashable]] = [[] for _ in range(max(ranks.values(), default=-1) + 1)]
    for vertex, rank in ranks.items():
        rows[rank].append(vertex)
    links: list[Edge] = []
    points: dict[Edge, list[Hashable]] = {}
    for a, b in dict.fromkeys(edges):
        path: list[Hashable] = [("point", a, b, r) for r in range(ranks[a] + 1, ranks[b])]
        for rank, point in enumerate(path, ranks[a] + 1):
            rows[rank].append(point)
        points[a, b] = path
        whole = [a, *path, b]
        links += pairwise(whole)
    return rows, links, points


def _order(rows: list[list[Hashable]], links: Sequence[Edge]) -> None:
    """Sort rows by the mean place of neighbours above and below, in turns."""
    above, below = _neighbours(links)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        near = above if down else below
        for row in rows if down else rows[::-1]:
            places = {v: i for other in rows for i, v in enumerate(other)}
            means = {
                v: sum(places[n] for n in near[v]) / len(near[v]) if near[v] else places[v]
                for v in row
            }
            row.sort(key=means.__getitem__)


def _positions(
    rows: list[list[Hashable]], links: Sequence[Edge], width: Mapping[Hashable, float]
) -> dict[Hashable, float]:
    """Centres: each row in its order, as near to its neighbours' mean as the gaps allow."""
    above, below = _neighbours(links)
    x: dict[Hashable, float] = {}
    for row in rows:
        _spread(row, {v: 0.0 for v in row}, width, x)
    for sweep in range(2 * SWEEPS):
        near = (above, below)[sweep % 2]
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted = {
                v: sum(x[n] for n in near[v]) / len(near[v]) if near[v] else x[v] for v in row
            }
            _spread(row, wanted, width, x)
    return x


def _spread(
    row: Sequence[Hashable],
    wanted: Mapping[Hashable, float],
    width: Mapping[Hashable, float],
    x: dict[Hashable, float],
) -> None:
    """Place a row at the wanted centres; vertices that would overlap are pushed apart as a group,
    around the group's mean (pool adjacent violators)."""
    offset = 0.0
    groups: list[tuple[list[float], float, int]] = []  # places, their start, how many
    for i, vertex in enumerate(row):
        if i:
            offset += (width[row[i - 1]] + width[vertex]) / 2 + GAP
        groups.append(([offset], wanted[vertex] - offset, 1))
        while len(groups) > 1 and groups[-2][1] > groups[-1][1]:
            places, mean, count = groups.pop()
            others, mean_before, before = groups[-1]
            total = count + before
            start = (mean * count + mean_before * before) / total
            groups[-1] = (others + places, start, total)
    starts = [(start, place) for places, start, _ in groups for place in places]
    for vertex, (start, place) in zip(row, starts, strict=True):
        x[vertex] = start + place


def _neighbours(
    links: Sequence[Edge],
) -> tuple[dict[Hashable, list[Hashable]], dict[Hashable, list[Hashable]]]:
    above: dict[Hashable, list[Hashable]] = defaultdict(list)
    below: dict[Hashable, list[Hashable]] = defaultdict(list)
    for a, b in links:
        above[b].append(a)
        below[a].append(b)
    return above, below
