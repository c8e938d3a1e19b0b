"""Tree records: the shape of a draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Annotated, ClassVar, TypeAlias

from pydantic import Field

from ..support.errors import InputError
from .base import Record, policy
from .bounds import (
    MOST_LEVELS,
    MOST_NODES,
    Amount,
    Chances,
    Inside,
    Levels,
    Nodes,
    Rank,
    Share,
    Widths,
)
from .shapes import Path, best_paths

Paths: TypeAlias = Annotated[
    tuple[Annotated[tuple[Rank, ...], Field(max_length=MOST_LEVELS)], ...],
    Field(max_length=MOST_NODES),
]


@dataclass(frozen=True)
class TreeRecord(Record):
    """Base of tree records.

    branches: whether a step must be told who continues whom. samples: whether tokens are sampled
    from the drafter's distributions.
    """

    slot: ClassVar[str] = "tree"
    noun: ClassVar[str] = "tree"
    requires: ClassVar[frozenset[str]] = frozenset({"trees"})
    branches: ClassVar[bool] = True
    samples: ClassVar[bool] = False

    @property
    def chain(self) -> bool:
        """Whether a draft is the best token of each level and no other, however likely it is."""
        return False

    @property
    def breadth(self) -> int:
        """Nodes of a level, at most, of which a drafter is asked what follows them."""
        return 1

    @property
    def deepest(self) -> int | None:
        """Its levels at most, `depth`; None: the drafter says."""
        own: int | None = getattr(self, "depth", None)
        return own

    @property
    def sure(self) -> bool:
        """Whether some prediction becomes the draft, however unlikely all are."""
        return True

    @property
    def independent(self) -> bool:
        """Whether siblings are sampled independently of each other."""
        return False

    @property
    def tells(self) -> bool:
        """Whether drafts say what their tokens were sampled from in greedy decoding, too."""
        return False

    def telling(self) -> TreeRecord:
        """The same tree, whose drafts say that. Errors: `InputError` if it samples nothing."""
        raise InputError(f"expected tree=sampled, got tree={self.brief}")

    @property
    def most(self) -> int | None:
        """Nodes at most; None: the drafter says."""
        return None


@policy
class Chain(TreeRecord):
    """The draft is a sequence: each token continues the one before.

    depth: tokens of a chain that is drawn from predictions; None: the drafter says, as one that
    copies always does.
    """

    depth: Levels | None = None
    kind: ClassVar[str] = "chain"
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    branches: ClassVar[bool] = False
    chain: ClassVar[bool] = True

    @classmethod
    def maker(cls) -> Callable[..., Chain]:
        """`of_depth`: a chain that is asked for has one."""
        return cls.of_depth

    @classmethod
    def of_depth(cls, depth: Levels = 5) -> Chain:
        """A chain of `depth` tokens at most."""
        return cls(depth)

    @property
    def most(self) -> int | None:
        return self.depth


class ShapedTree(TreeRecord):
    """Base of trees with a node for each of their `paths`."""

    paths: Paths

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        return max(map(len, self.paths), default=0)

    @property
    def most(self) -> int:
        return len(self.paths)

    @property
    def chain(self) -> bool:
        """Whether it has one node a level, the likeliest."""
        return all(rank == 0 for path in self.paths for rank in path)

    @property
    def breadth(self) -> int:
        """Inner nodes of a level, at most."""
        inner = {path[:-1] for path in self.paths if len(path) > 1}
        return max(Counter(map(len, inner)).values(), default=0)


@policy
class StaticTree(ShapedTree):
    """The same shape every step. paths: a node each, as its ranks among siblings from the root.

    ``((0,), (0, 0), (1,))``: the likeliest token, what follows it, and the second likeliest token.
    The most valuable first, as a draft that is cut keeps the first ones; every node comes after its
    parent. Errors: `InputError` otherwise. Instead of paths: `nodes`, how many the best tree has if
    `accepted`[d][r] is how often the candidate of rank r at depth d + 1 is accepted; see `chosen`.
    """

    paths: Paths = ((0,),)
    kind: ClassVar[str] = "static"

    def check(self) -> None:
        known: set[Path] = {()}
        for path in self.paths:
            if path in known:
                raise InputError(f"static tree: a path is given twice or is empty: {path}")
            if path[:-1] not in known or path[-1] < 0:
                raise InputError(
                    f"static tree: path {path} has no parent {path[:-1]} among the paths before it"
                )
            known.add(path)

    @classmethod
    def maker(cls) -> Callable[..., StaticTree]:
        return cls.chosen

    @classmethod
    def chosen(
        cls, paths: Paths = (), nodes: Nodes | None = None, accepted: Chances = ()
    ) -> StaticTree:
        """The tree with these paths, in any order, or the best one of `nodes` nodes.

        accepted: accepted[d][r] is how often the candidate of rank r at depth d + 1 is accepted
        (Sequoia, Chen et al. 2024; Medusa, Cai et al. 2024). Errors: `InputError` for both or
        neither of them, and for chances of one depth that add up to more than 1.
        """
        if bool(paths) == bool(accepted and nodes):
            raise InputError("give either paths, or nodes and accepted")
        if any(sum(chances) > 1 + 1e-6 for chances in accepted):
            raise InputError("accepted: chances of one depth add up to at most 1")
        return cls.of(paths) if paths else cls.best(accepted, nodes or 0)

    @classmethod
    def best(cls, accepted: Sequence[Sequence[float]], nodes: int) -> StaticTree:
        """The tree of `nodes` nodes with the most accepted tokens (`shapes.best_paths`)."""
        return cls(tuple(best_paths(accepted, nodes)))

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> StaticTree:
        """A tree of paths in any order. Nobody knows what they are worth: a rank and a level more
        count alike."""
        return cls(tuple(sorted((tuple(path) for path in paths), key=_by_ranks)))

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes at each depth."""
        counts = Counter(map(len, self.paths))
        return tuple(counts[depth] for depth in range(1, self.depth + 1))


@policy
class BestFirst(TreeRecord):
    """The likeliest nodes, found anew each step, for drafters whose scores are probabilities.

    At each of `depth` levels the `width` nodes with the highest probability of their whole path are
    expanded into `width` children each; of everything seen the best `nodes` are kept (EAGLE-2, Li
    et al. 2024). gain: no deeper level if the last one added less than this to the expected
    accepted tokens (OPT-Tree, Wang et al. 2025). least: no node whose path is less probable than
    this (DySpec, Xiong et al. 2024).
    """

    nodes: Nodes = 60
    depth: Levels = 5
    width: Nodes = 10
    gain: Amount = 0.0
    least: Share = 0.0
    kind: ClassVar[str] = "best_first"

    @property
    def most(self) -> int:
        return self.nodes

    @property
    def chain(self) -> bool:
        """Whether one node a level is expanded into one, and none is left out as unlikely."""
        return self.width == 1 and not self.gain and not self.least

    @property
    def breadth(self) -> int:
        """`width`, if there are levels below the first."""
        return self.width if self.depth > 1 else 0

    @property
    def sure(self) -> bool:
        """Whether none is left out as unlikely."""
        return not self.least


@policy
class SampledTree(TreeRecord):
    """Tokens sampled from the drafter's own distributions, anew each step; when greedy, the best.

    widths: children of every node, by depth; (1, 1, 1) is a chain of three sampled tokens.
    replacement: whether siblings are drawn independently of each other, so that two may be the same
    token (SpecTr, Sun et al. 2023), instead of without replacement (Recursive Speculative Decoding,
    Jeon et al. 2024). told: whether the verifier is told the drafter's distributions in greedy
    decoding too. Errors: `InputError` for widths below 1 or none.
    """

    widths: Widths = (4, 2, 1)
    replacement: bool = False
    told: bool = False
    kind: ClassVar[str] = "sampled"
    provides: ClassVar[frozenset[str]] = frozenset({"sampled trees"})
    samples: ClassVar[bool] = True

    @property
    def independent(self) -> bool:
        return self.replacement

    @property
    def tells(self) -> bool:
        return self.told

    def telling(self) -> SampledTree:
        return replace(self, told=True)

    def check(self) -> None:
        if self.most > MOST_NODES:
            raise InputError(f"sampled tree: {self.widths} makes more than {MOST_NODES} nodes")

    @property
    def depth(self) -> int:
        """Levels."""
        return len(self.widths)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes at each depth."""
        return tuple(accumulate(self.widths, mul))

    @property
    def most(self) -> int:
        return sum(self.sizes)

    @property
    def chain(self) -> bool:
        """Whether every node has one child."""
        return max(self.widths) == 1

    @property
    def breadth(self) -> int:
        """Nodes of the last level but one."""
        return self.sizes[-2] if len(self.widths) > 1 else 0


@policy
class WidenedChain(TreeRecord):
    """A chain of the likeliest tokens with siblings beside it where the drafter is unsure (CaPE).

    depth: of the chain. counts: candidates of a level, the chain's own token included: counts[i] up
    to a probability of `bounds`[i] of that token, the last one above all of them. Only the chain
    itself is predicted further, so that the drafter runs as often as for a chain (Du et al., "GliDe
    with a CaPE", 2024). Errors: `InputError` for bounds that do not rise within 0..1, or counts
    that are not one more than bounds.
    """

    depth: Levels = 5
    bounds: tuple[Inside, ...] = (0.3, 0.6, 0.8)
    counts: Widths = (7, 5, 3, 1)
    kind: ClassVar[str] = "widened"

    def check(self) -> None:
        rising = all(a < b for a, b in pairwise((0.0, *self.bounds, 1.0)))
        if not rising or len(self.counts) != len(self.bounds) + 1:
            raise InputError(
                f"widened chain: expected bounds that rise between 0 and 1 and a count of at least "
                f"1 below each and above all of them, got {self}"
            )
        if self.most > MOST_NODES:
            raise InputError(f"widened chain: {self} may have more than {MOST_NODES} nodes")

    @property
    def most(self) -> int:
        """Nodes where the drafter is sure of nothing."""
        return self.depth * max(self.counts)


def _by_ranks(path: Path) -> tuple[int, Path]:
    return len(path) + sum(path), path
