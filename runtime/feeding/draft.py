"""Drafts: guessed tokens, as a chain or as a tree; and the steps that they are fed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

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


class Draft(NamedTuple):
    """Guessed tokens that would continue a sequence.

    parents: of each token, the index of the token it continues, -1 for the sequence's last token;
    parents come first. None: a chain, each continuing the one before. probs: f32[N,V], for each
    token the distribution that it was sampled from: more are accepted when the verifier knows. None
    is lossless however the tokens came about; `probs` that they were not sampled from are not.
    independent: with `probs`, how siblings were sampled: each on its own, so that two may be the
    same; else one after the other without replacement, all from their parent's distribution, which
    `probs` repeats as it was before the first one left it.

    riders: tokens that are fed along behind the draft and are never accepted: a drafter reads
    what the step makes of them. follows: of each, the column less one that it continues: -1, a
    node, or ``len(tokens) + i`` for rider i before it. Verifiers do not see them, and their cache
    rows are forgotten.
    """

    tokens: Sequence[int]
    probs: torch.Tensor | None = None
    parents: tuple[int, ...] | None = None
    independent: bool = False
    riders: tuple[int, ...] = ()
    follows: tuple[int, ...] = ()

    @property
    def fed(self) -> Sequence[int]:
        """The tokens and the riders: what a step is fed after the last committed token."""
        return [*self.tokens, *self.riders] if self.riders else self.tokens

    @property
    def shape(self) -> Topology:
        """Depths and ancestors of all that is fed. A chain has one too."""
        parents = self.parents or tuple(range(-1, len(self.tokens) - 1))
        return topology(parents + self.follows)

    @property
    def branches(self) -> bool:
        """Whether a step must be told who continues whom."""
        return self.parents is not None or bool(self.riders)

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
        riders = self._riders(range(count))
        return Draft(self.tokens[:count], probs, parents, self.independent, *riders)

    def within(self, depth: int) -> Draft:
        """The tokens at most `depth` deep."""
        if self.parents is None:
            return self.cut(depth)
        depths = self.shape.depths[: len(self.tokens)]
        if max(depths, default=0) <= depth:
            return self
        kept = [node for node, deep in enumerate(depths) if deep <= depth]
        new = {-1: -1} | {node: index for index, node in enumerate(kept)}
        return Draft(
            [self.tokens[node] for node in kept],
            None if self.probs is None else self.probs[kept],
            tuple(new[self.parents[node]] for node in kept),
            self.independent,
            *self._riders(kept),
        )

    def fitting(self, columns: int) -> Draft:
        """What of the draft a step can be fed that has so many columns for it; riders go first."""
        if len(self.tokens) + len(self.riders) <= columns:
            return self
        return Draft(self.tokens, self.probs, self.parents, self.independent).cut(columns)

    def riding(self, riders: Sequence[int], follows: Sequence[int]) -> Draft:
        """The draft with these riders."""
        return self._replace(riders=tuple(riders), follows=tuple(follows))

    def _riders(self, kept: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The riders that continue these nodes or the root, and whom."""
        if not self.riders:
            return (), ()
        new = {-1: -1} | {node: index for index, node in enumerate(kept)}
        riders: list[int] = []
        follows: list[int] = []
        for index, (rider, column) in enumerate(zip(self.riders, self.follows, strict=True)):
            if column in new:
                new[len(self.tokens) + index] = len(kept) + len(riders)
                riders.append(rider)
                follows.append(new[column])
        return tuple(riders), tuple(follows)


NO_DRAFT = Draft(())
"""No guess: the step yields one token."""


class UnverifiedStep(NamedTuple):
    """A step that ran, before anything was verified: a piece of the prompts, or a draft.

    rows: the tokens fed to each sequence; starts: tokens of its text before them. outputs: what the
    drafter `wants`, valid during the call only: values a token fed (dim T) as they are; values a
    token chosen (dim S) hold the columns that the step selected.
    """

    rows: Sequence[Sequence[int]]
    starts: Sequence[int]
    outputs: Mapping[str, torch.Tensor]


class VerifiedStep(NamedTuple):
    """What came of a step, for each sequence.

    drafts: as they were fed. paths: the draft nodes that were accepted, from the root down. tokens:
    what the sequence gained: the accepted tokens and one more; [] if it was finished. columns:
    where the values of the token before those are in outputs with a column a token fed: 0, but in
    the last piece of a prompt. outputs: as `UnverifiedStep.outputs`.
    """

    drafts: Sequence[Draft]
    paths: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    columns: Sequence[int]
    outputs: Mapping[str, torch.Tensor]
