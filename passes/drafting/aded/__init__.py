"""Draft a tree by a search over tri-grams, whose weights follow what the target writes.

Source: Liu et al., "Adaptive Draft-Verification for Efficient Large Language Model Decoding" (ADED,
2024), and its public code (Adaptix).

A matrix has a weight for each token that followed two tokens: a corpus's shares, and `gain` more
for every tri-gram among the text's last tokens after each step. The draft is what a Monte Carlo
tree search visits most. From a node with N visits the search goes on to the child with the largest

    Q / n + P (c1 + ln((N + c2 + 1) / c2)) sqrt(N) / (1 + n)

n being the child's visits, P its weight, and Q what these visits were worth: 1 and the weights
along the path, which random successors lengthen to `depth` tokens. Children that were not visited
come first. Each of the sequences that were visited most gets its likeliest successor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log, sqrt
from random import Random
from typing import ClassVar, TypeAlias

import torch

from ....ir import InputError
from ....ir.plan import DraftRecord, Size, record
from ....ir.plan.bounds import Factor, Filled, Levels, Nodes
from ....runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ....runtime.memo import Lore, Memo
from ....runtime.speculate.drafters.base import DRAFTERS, Drafter, lore_of
from ....runtime.speculate.setting import Setting
from ....runtime.speculate.trie import Trie
from ..ngram_cache import CorpusCounts, static_counts


@record
@dataclass(frozen=True)
class TrigramDraft(DraftRecord):
    """The sequences that a search over tri-grams visits most, as a tree (ADED).

    weight: i64[N] of the program, a corpus; -1 ends a document; None: the matrix begins empty.
    nodes: of a draft. depth: tokens of a path. searches: paths that are tried a step. successors:
    of two tokens, that the search looks at. gain: what a tri-gram's weight grows by, `most_weight`
    at most; recent: tokens of the text whose tri-grams' weights grow. c1, c2: of the search.
    """

    weight: Filled[str | None] = None
    nodes: Nodes = 24
    depth: Levels = 4
    searches: Nodes = 150
    successors: Nodes = 12
    gain: Factor = 0.04
    most_weight: Factor = 3.0
    recent: Nodes = 16
    c1: Factor = 32.0
    c2: Factor = 8.0
    kind: ClassVar[str] = "trigrams"
    requires: ClassVar[frozenset[str]] = frozenset({"cached", "trees"})
    branches: ClassVar[bool] = True
    foresees: ClassVar[bool] = True

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        if self.weight is not None:
            yield self.weight, True, ("",)


Pair: TypeAlias = tuple[int, int]
Successors: TypeAlias = Sequence[tuple[int, float]]
"""Tokens and their weights, the heaviest first."""

PAIRS = 200_000
"""Pairs of tokens that a generation of a matrix holds; two generations are kept."""


class Matrix(Lore):
    """Weights of the tokens that followed two tokens. Of the pairs whose weights did not change for
    longest it forgets half at a time, down to the corpus's shares.

    >>> matrix = Matrix(TrigramDraft(gain=0.5))
    >>> matrix.add([1, 2, 3, 1, 2, 4, 1, 2, 3])
    >>> matrix.after((1, 2))
    [(3, 1.0), (4, 0.5)]
    """

    corpus: CorpusCounts | None = None

    def __init__(self, record: TrigramDraft, limit: int = PAIRS) -> None:
        self.gain, self.most, self.count = record.gain, record.most_weight, record.successors
        self.limit = limit
        self.new: dict[Pair, dict[int, float]] = {}
        self.old: dict[Pair, dict[int, float]] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """Every tri-gram of the tokens weighs more."""
        for first, second, token in zip(tokens, tokens[1:], tokens[2:], strict=False):
            row = self._row((first, second))
            row[token] = min(row.get(token, 0.0) + self.gain, self.most)

    def after(self, pair: Pair) -> Successors:
        """What followed two tokens."""
        row = self.new.get(pair) or self.old.get(pair) or self._shares(pair)
        return sorted(row.items(), key=lambda item: -item[1])[: self.count]

    def _row(self, pair: Pair) -> dict[int, float]:
        row = self.new.get(pair)
        if row is None:
            known = self.old.pop(pair, None)
            row = self.new[pair] = self._shares(pair) if known is None else known
            if len(self.new) > self.limit:
                self.old, self.new = self.new, {}
        return row

    def _shares(self, pair: Pair) -> dict[int, float]:
        """The corpus's likeliest successors, as shares of all."""
        if self.corpus is None:
            return {}
        counts = self.corpus.get(pair)
        total = sum(counts.values())
        best = sorted(counts.items(), key=lambda item: -item[1])[: self.count]
        return {token: count / total for token, count in best}

    def tensors(self) -> Memo:
        """pairs: i32[N,2]. tokens: i32[N]. weights: f32[N]; the oldest first."""
        rows = [
            (*pair, token, weight)
            for part in (self.old, self.new)
            for pair, row in part.items()
            for token, weight in row.items()
        ]
        first, second, tokens, weights = zip(*rows, strict=True) if rows else ((), (), (), ())
        pairs = torch.tensor([first, second], dtype=torch.int32)
        return {
            "pairs": pairs.reshape(2, -1).T.contiguous(),
            "tokens": torch.tensor(tokens, dtype=torch.int32),
            "weights": torch.tensor(weights, dtype=torch.float32),
        }

    def take(self, memo: Memo, vocabulary: int) -> None:
        _check(memo, vocabulary)
        old: dict[Pair, dict[int, float]] = {}
        parts = [memo[name].tolist() for name in ("pairs", "tokens", "weights")]
        for (first, second), token, weight in zip(*parts, strict=True):
            old.setdefault((first, second), {})[token] = min(weight, self.most)
        self.new, self.old = {}, old


def _check(memo: Memo, vocabulary: int) -> None:
    """Errors: `InputError` for tensors of a file that are no matrix's."""
    if memo.keys() != {"pairs", "tokens", "weights"}:
        raise InputError(f"expected pairs, tokens and weights, got {', '.join(sorted(memo))}")
    pairs, tokens, weights = memo["pairs"], memo["tokens"], memo["weights"]
    types = [t.dtype for t in (pairs, tokens, weights)]
    shapes = pairs.dim() == 2 and pairs.shape[1:] == (2,) and tokens.dim() == weights.dim() == 1
    if types != [torch.int32, torch.int32, torch.float32] or not shapes:
        raise InputError("expected pairs i32[N,2], tokens i32[N] and weights f32[N]")
    if not len(pairs) == len(tokens) == len(weights):
        raise InputError("expected as many pairs, tokens and weights")
    if not len(tokens):
        return
    ids = torch.cat([pairs.reshape(-1), tokens])
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise InputError(f"token ids outside 0..{vocabulary - 1}")
    if not bool(((weights > 0) & weights.isfinite()).all()):
        raise InputError("weights that are not above 0")


class _Node:
    """A sequence that the search has met. pair: its last two tokens. prior: its weight. path: its
    tokens. children: None before it was visited."""

    __slots__ = ("children", "pair", "path", "prior", "visits", "worth")

    def __init__(self, pair: Pair, prior: float, path: tuple[int, ...]) -> None:
        self.pair, self.prior, self.path = pair, prior, path
        self.visits, self.worth = 0, 0.0
        self.children: list[_Node] | None = None


class Search:
    """A Monte Carlo tree search over the successors of two tokens. See the module docstring."""

    def __init__(
        self, record: TrigramDraft, after: Callable[[Pair], Successors], random: Random
    ) -> None:
        self.record, self.random = record, random
        known: dict[Pair, Successors] = {}

        def looked_up(pair: Pair) -> Successors:
            found = known.get(pair)
            if found is None:
                found = known[pair] = after(pair)
            return found

        self.after = looked_up

    def run(self, pair: Pair, depth: int) -> list[_Node]:
        """Sequences of up to `depth` tokens behind a pair, those visited most first."""
        root = _Node(pair, 0.0, ())
        self.nodes: list[_Node] = []
        for _ in range(self.record.searches):
            path = self._down(root, depth)
            worth = 1 + sum(node.prior for node in path) + self._onward(path[-1], depth)
            for node in path:
                node.visits += 1
                node.worth += worth
        # Parents were met before their children and visited no less.
        return sorted(self.nodes, key=lambda node: -node.visits)

    def _down(self, root: _Node, depth: int) -> list[_Node]:
        """The way to a node that was not visited yet, or that nothing follows."""
        path = [root]
        while len(path[-1].path) < depth:
            node = path[-1]
            if node.children is None:
                node.children = self._open(node)
                if node.children:
                    path.append(node.children[0])
                return path
            if not node.children:
                return path
            path.append(self._chosen(node))
        return path

    def _open(self, node: _Node) -> list[_Node]:
        last = node.pair[1]
        children = [
            _Node((last, token), prior, (*node.path, token))
            for token, prior in self.after(node.pair)
        ]
        self.nodes += children
        return children

    def _chosen(self, node: _Node) -> _Node:
        children, c1, c2 = node.children or [], self.record.c1, self.record.c2
        factor = (c1 + log((node.visits + c2 + 1) / c2)) * sqrt(node.visits)
        best, found = -1.0, children[0]
        for child in children:
            visits = child.visits
            if not visits:
                return child
            value = child.worth / visits + factor * child.prior / (1 + visits)
            if value > best:
                best, found = value, child
        return found

    def _onward(self, node: _Node, depth: int) -> float:
        """What random successors add to a path's worth."""
        pair, added = node.pair, 0.0
        for _ in range(depth - len(node.path)):
            successors = self.after(pair)
            if not successors:
                break
            point = self.random.random() * sum(weight for _, weight in successors)
            place = 0
            while place + 1 < len(successors) and point >= successors[place][1]:
                point -= successors[place][1]
                place += 1
            token, weight = successors[place]
            added += weight
            pair = (pair[1], token)
        return added


@DRAFTERS.register(TrigramDraft)
class TrigramDrafter(Drafter):
    """One matrix for all texts. See the module docstring."""

    record: TrigramDraft
    lore = Matrix

    def __init__(self, record: TrigramDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.matrix: Matrix = lore_of(self.executable, TrigramDrafter, record)
        self.matrix.corpus = static_counts(self.executable, record.weight)
        self.random = Random(0)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in self.readable(prompts):
            self.matrix.add(prompt)
        keep = max(self.record.recent, 2)
        self.ends = [list(prompt[-keep:]) for prompt in self.known(prompts)]

    def observe(self, taken: VerifiedStep) -> None:
        keep = max(self.record.recent, 2)
        for index, tokens in enumerate(taken.tokens):
            if tokens:
                end = self.ends[index] = [*self.ends[index], *tokens][-keep:]
                self.matrix.add(end)

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        return [
            self._drawn((end[-2], end[-1]), min(room, self.record.depth))
            if room > 0 and len(end) > 1
            else NO_DRAFT
            for end, room in zip(self.ends, rooms, strict=True)
        ]

    def ahead(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        found = []
        for end, extra, count in zip(self.ends, tokens, counts, strict=True):
            known = [*end, *extra][-2:]
            while len(known) > 1 and len(known) < 2 + count:
                successors = self.matrix.after((known[-2], known[-1]))
                if not successors:
                    break
                known.append(successors[0][0])
            found.append(known[2:])
        return found

    def _drawn(self, pair: Pair, depth: int) -> Draft:
        """The sequences that a search visits most, each with its likeliest successor."""
        search = Search(self.record, self.matrix.after, self.random)
        trie, most = Trie(), self.record.nodes
        for node in search.run(pair, max(depth - 1, 1)):
            if len(trie.tokens) >= most:
                break
            place = trie.path(-1, node.path)
            following = search.after(node.pair) if len(node.path) < depth else ()
            if following and len(trie.tokens) < most:
                trie.add(place, following[0][0])
        return trie.draft()
