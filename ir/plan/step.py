"""Step records: which of a program's functions the decode loop feeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from .base import Record, Returned, record
from .bounds import Place, Rollout

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan


@dataclass(frozen=True)
class StepRecord(Record):
    """Base of step records.

    in_parts: a step is several calls, one after the other: `parts`.
    """

    slot: ClassVar[str] = "step"
    noun: ClassVar[str] = "step"
    in_parts: ClassVar[bool] = False

    @property
    def plain(self) -> str:
        """The function that gives the target's results and does nothing else: what passes extend,
        what training and the validator run. `function`, unless a record says another one."""
        function: str = getattr(self, "function")  # noqa: B009
        return function

    @property
    def variants(self) -> tuple[str, ...]:
        """Every function that runs the target from its tokens to its logits."""
        return tuple(dict.fromkeys((self.plain, self.fed(argmax=True)[0])))

    def fed(self, argmax: bool) -> tuple[str, int]:
        """The function that steps run, and the cache rows that it makes for itself behind those of
        what it is fed. argmax: whether the target's best token is always what is kept."""
        return self.plain, 0

    def read(self, argmax: bool) -> tuple[str, int]:
        """As `fed`, for prompts."""
        return self.fed(argmax)

    @property
    def ahead(self) -> str:
        """The function that prompts run through up to their last token, which `read` has: it leaves
        their rows in the caches, and returns nothing else. "": `read` has them all."""
        return ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The functions that are called, in order; () where one does it all."""
        return ()

    @property
    def along(self) -> tuple[str, ...]:
        """Those of them that make nothing of the target's: they read along."""
        return ()

    @property
    def cuts(self) -> tuple[float, ...]:
        """Layers up to the end of each part but the last that has some; halves are attention."""
        return ()

    @property
    def halves(self) -> bool:
        """Whether some part ends inside a layer."""
        return any(cut % 1 for cut in self.cuts)

    @property
    def mlps(self) -> dict[int, int]:
        """Places of the parts that are a layer's MLP and no more, by the layer."""
        return {}

    @property
    def inner(self) -> tuple[int, ...]:
        """Places of the parts that hold nothing of the first nor the last layer."""
        return ()


@record
class Whole(StepRecord):
    """A step is one call of `function`, which runs the target from its tokens to its logits."""

    function: str = "step"
    kind: ClassVar[str] = "whole"


@record
class Fused(StepRecord):
    """A step is one call of `function`, which verifies by its argmax and makes the next draft, too.

    function: takes what `plain` takes, and the draft's states; returns what `plain` returns, and
    ``drafted`` i64[B,1+levels]: the last fed token that the argmax agrees with, and the chain that
    follows. spare: rows of the draft's states that it writes beyond those of what it is fed. plain:
    runs where something else decides than the argmax.
    """

    function: str = "step.drafting"
    plain: str = "step"
    spare: Rollout = 0
    kind: ClassVar[str] = "fused"

    def fed(self, argmax: bool) -> tuple[str, int]:
        return (self.function, self.spare) if argmax else (self.plain, 0)


@record
class Prefilled(StepRecord):
    """A step is one call of `function`, and prompts run through `prefill`, which has more layers.

    Both take and return the same, and share the caches of the layers that both have.
    """

    function: str = "step"
    prefill: str = "prefill"
    kind: ClassVar[str] = "prefilled"

    @property
    def variants(self) -> tuple[str, ...]:
        return self.function, self.prefill

    def read(self, argmax: bool) -> tuple[str, int]:
        return self.prefill, 0

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.prefill, {"logits": ("", "", "V")}


@record
class Predicted(StepRecord):
    """A step is one call of `function`, and prompts run through `predict` up to their last token.

    predict: runs a few layers, and writes rows for the others, too (KV Prediction, Horton et al.
    2024). The last token goes through all layers, which look at those rows.
    """

    function: str = "step"
    predict: str = "predict"
    kind: ClassVar[str] = "predicted"

    @property
    def ahead(self) -> str:
        return self.predict

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.predict, {}


@record
class Accompanied(StepRecord):
    """A step is a call of `function`, which runs the target from its tokens to its logits, and one
    of `beside`, another model's, with caches of its own, on the same tokens.

    Drafts may lead tokens through the first before the other reads them all at once.
    """

    function: str = "step"
    beside: str = "reference"
    kind: ClassVar[str] = "accompanied"

    @property
    def parts(self) -> tuple[str, ...]:
        return self.function, self.beside

    @property
    def along(self) -> tuple[str, ...]:
        return (self.beside,)

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: tokens that the target never reads, or reads in part."""
        if plan.depth.stops:
            yield (
                f"step={self.brief} lets {self.beside} read what the target reads, and depth="
                f"{plan.depth.brief} has other models or fewer layers read some: leave one of the "
                f"two out"
            )


@record
class Segments(StepRecord):
    """A step is a call of each of `functions` in turn, as deep as it goes, and one of `head`.

    A function takes up each token's residual stream where the one before has left it, in the state
    `state`; the head makes logits of it at any depth. plain: all of them in one. exits: layers up
    to the end of each function but the last, counted from the first. within: layers, the first
    being 0, that are cut behind their attention, too. layers: there are in all.
    """

    functions: tuple[str, ...] = ("step.0", "step.1")
    plain: str = "step"
    head: str = "step.head"
    state: str = "stream"
    exits: tuple[Place, ...] = (1,)
    within: tuple[Place, ...] = ()
    layers: Place = 2
    kind: ClassVar[str] = "segments"
    in_parts: ClassVar[bool] = True

    def check(self) -> None:
        rising = all(a < b for a, b in pairwise((0, *self.exits)))
        several = len(set(self.functions)) == len(self.functions) == len(set(self.cuts)) + 1
        if not (several and rising and len(set(self.cuts)) == len(self.cuts)):
            raise InputError(
                f"expected rising exits between different functions, got functions="
                f"{self.functions}, exits={self.exits} and within={self.within}"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.functions, self.head)

    @property
    def cuts(self) -> tuple[float, ...]:
        """`exits`, and half a layer behind those before each of `within`."""
        return tuple(sorted((*self.exits, *(layer + 0.5 for layer in self.within))))

    @property
    def inner(self) -> tuple[int, ...]:
        return tuple(at for at, (a, b) in self._spans() if a >= 1 and b <= self.layers - 1)

    @property
    def mlps(self) -> dict[int, int]:
        return {int(a): at for at, (a, b) in self._spans() if b - a < 1 and a % 1}

    def _spans(self) -> Iterator[tuple[int, tuple[float, float]]]:
        """Each function's place, and the layers before it and up to its end."""
        return enumerate(pairwise((0.0, *self.cuts, float(self.layers))))

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        for function in self.functions:
            yield function, {self.state: ("", 1, "", "")}
        yield self.head, {"logits": ("", "", "V")}
