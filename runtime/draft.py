"""Drafts: guessed tokens, as a chain or as a tree, and what follows from a tree's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


class Topology:
    """The shape of a tree: node i continues node ``parents[i]`` < i, or the root (-1).

    depths: of each node, 1 for a child of the root. The step sees the root as column 0 and node i
    as column i + 1; ancestors: bool[N+1,N+1], row c marks the columns that column c continues,
    itself included.
    """

    __slots__ = ("ancestors", "depths", "parents")

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = tuple(parents)
        depths, rows = [0], [1]
        # A row is an integer, a bit a column: some trees are new every step.
        for column, parent in enumerate(self.parents, 1):
            depths.append(depths[parent + 1] + 1)
            rows.append(rows[parent + 1] | 1 << column)
        self.depths = tuple(depths[1:])
        size = len(rows)
        packed = b"".join([row.to_bytes(size // 8 + 1, "little") for row in rows])
        bits = np.frombuffer(packed, dtype=np.uint8).reshape(size, -1)
        self.ancestors = np.unpackbits(bits, axis=1, count=size, bitorder="little").view(np.bool_)

    def path(self, node: int) -> list[int]:
        """The nodes from a child of the root down to `node`; none for the root, -1."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


@lru_cache(maxsize=256)
def topology(parents: tuple[int, ...]) -> Topology:
    """The shape with these parents; shapes that come back are not worked out anew."""
    return Topology(parents)


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens that would continue a sequence.

    parents: of each token, the index of the token it continues, -1 for the sequence's last token;
    parents come first. None: a chain, each continuing the one before. probs: f32[N,V], for each
    token the distribution that it was sampled from: more are accepted when the verifier knows. None
    is lossless however the tokens came about; `probs` that they were not sampled from are not.
    independent: with `probs`, how siblings were sampled: each on its own, so that two may be the
    same; else one after the other without replacement, all from their parent's distribution, which
    `probs` repeats as it was before the first one left it.
    """

    tokens: Sequence[int]
    probs: torch.Tensor | None = None
    parents: tuple[int, ...] | None = None
    independent: bool = False

    @property
    def shape(self) -> Topology:
        """Depths and ancestors. A chain has one too."""
        return topology(self.parents or tuple(range(-1, len(self.tokens) - 1)))

    def depth(self, node: int) -> int:
        """Tokens of the path down to `node`, itself included; 0 for the root, -1."""
        if node < 0 or self.parents is None:
            return node + 1
        return self.shape.depths[node]

    def path(self, node: int) -> list[int]:
        """The nodes down to `node`, itself included."""
        return list(range(node + 1)) if self.parents is None else self.shape.path(node)

    def children(self) -> dict[int, list[int]]:
        """The children of each inner node, in order, and of the root, -1."""
        found: dict[int, list[int]] = {}
        for node in range(len(self.tokens)):
            parent = node - 1 if self.parents is None else self.parents[node]
            found.setdefault(parent, []).append(node)
        return found

    def cut(self, count: int) -> Draft:
        """The first `count` tokens: still a tree, because parents come first."""
        if count >= len(self.tokens):
            return self
        probs = None if self.probs is None else self.probs[:count]
        parents = None if self.parents is None else self.parents[:count]
        return Draft(self.tokens[:count], probs, parents, self.independent)

    def within(self, depth: int) -> Draft:
        """The tokens at most `depth` deep."""
        if self.parents is None:
            return self.cut(depth)
        depths = self.shape.depths
        if max(depths, default=0) <= depth:
            return self
        kept = [node for node, deep in enumerate(depths) if deep <= depth]
        new = {-1: -1} | {node: index for index, node in enumerate(kept)}
        return Draft(
            [self.tokens[node] for node in kept],
            None if self.probs is None else self.probs[kept],
            tuple(new[self.parents[node]] for node in kept),
            self.independent,
        )


NO_DRAFT = Draft(())
