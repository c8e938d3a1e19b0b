"""Tree records whose tokens are sampled, and whose shape is not one number of children a level."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from ..support.errors import InputError
from .base import policy
from .bounds import MOST_NODES, Chances, Levels, Nodes
from .shapes import best_paths
from .tree import Paths, ShapedTree, TreeRecord


@policy
class SampledShape(ShapedTree):
    """The same shape every step, its tokens sampled from the drafter; when greedy, the best.

    paths: a node each, parents and earlier siblings first, the nodes that are worth most first, so
    that the first so many are the best tree of that size. Node (0, 2): of the first child of the
    root the third one. Siblings are sampled without replacement (Sequoia, Chen et al. 2024).
    Instead of paths: `nodes`, how many the best tree has if `accepted`[d][r] is how often the
    candidate of rank r at depth d + 1 is accepted; see `chosen`. Errors: `InputError` for a node
    without its parent or its earlier siblings.
    """

    paths: Paths = ((0,),)
    kind: ClassVar[str] = "sampled_shape"
    samples: ClassVar[bool] = True

    def check(self) -> None:
        known: set[tuple[int, ...]] = {()}
        for path in self.paths:
            before = (*path[:-1], path[-1] - 1) if path and path[-1] > 0 else path[:-1]
            if not path or path in known or path[:-1] not in known or before not in known:
                raise InputError(
                    f"sampled shape: path {path} is given twice, or before its parent or an "
                    f"earlier sibling of it"
                )
            known.add(path)

    @classmethod
    def maker(cls) -> Callable[..., SampledShape]:
        return cls.chosen

    @classmethod
    def chosen(
        cls, paths: Paths = (), nodes: Nodes | None = None, accepted: Chances = ()
    ) -> SampledShape:
        """The tree with these paths, or the best one of `nodes` nodes.

        accepted: accepted[d][r] is how often the sample number r of a node at depth d is accepted,
        those before it being rejected or not; as many levels as rows. Rates of later samples are no
        higher than those of earlier ones (Sequoia's assumption). Errors: `InputError` for both or
        neither of them, and for rates that rise.
        """
        if bool(paths) == bool(accepted and nodes):
            raise InputError("give either paths, or nodes and accepted")
        if any(sorted(rates, reverse=True) != list(rates) for rates in accepted):
            raise InputError("accepted: rates of a depth fall from sample to sample")
        return cls(tuple(paths)) if paths else cls.best(accepted, nodes or 0)

    @classmethod
    def best(cls, accepted: Iterable[Sequence[float]], nodes: int) -> SampledShape:
        """The tree of `nodes` nodes with the most accepted tokens (`shapes.best_paths`)."""
        return cls(tuple(best_paths(list(accepted), nodes)))


@policy
class DynamicSample(TreeRecord):
    """The likeliest places of this step's predictions, their tokens sampled (DySpec).

    A place is worth the chance that verification comes to it: the probabilities of its ancestors'
    tokens, times what earlier siblings left of its parent's distribution; how likely its own token
    is plays no part, or the target's distribution would not be kept. The best `nodes` places become
    the draft (Xiong et al., "DySpec", 2024). At each of `depth` levels the `width` likeliest nodes
    get up to `width` children each. When greedy: the likeliest nodes (`BestFirst`).
    """

    nodes: Nodes = 12
    depth: Levels = 6
    width: Nodes = 4
    kind: ClassVar[str] = "dynamic_sample"
    samples: ClassVar[bool] = True

    @property
    def most(self) -> int:
        return self.nodes

    @property
    def breadth(self) -> int:
        """`width`, if there are levels below the first."""
        return self.width if self.depth > 1 else 0


@policy
class StochasticBeam(TreeRecord):
    """Of each of `depth` levels the `width` nodes of a stochastic beam, drawn without replacement.

    A path's score is its log probability with Gumbel noise, drawn so that its parent's is the
    largest of its children's; all that the beam has held is the draft (RSD-S: Jeon et al.,
    "Recursive Speculative Decoding", 2024; Kool et al., "Stochastic Beams and Where to Find Them",
    2019). When greedy: a beam search.
    """

    width: Nodes = 3
    depth: Levels = 4
    kind: ClassVar[str] = "stochastic_beam"
    samples: ClassVar[bool] = True

    def check(self) -> None:
        if self.most > MOST_NODES:
            raise InputError(f"stochastic beam: {self} makes more than {MOST_NODES} nodes")

    @property
    def most(self) -> int:
        return self.width * self.depth

    @property
    def chain(self) -> bool:
        """Whether the beam holds one path."""
        return self.width == 1

    @property
    def breadth(self) -> int:
        """`width`, if there are levels below the first."""
        return self.width if self.depth > 1 else 0
