"""What the decode loop asks of a compiled program. Backends implement it; the runtime drives it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from ..plan import DecodePlan
from ..program import Program
from ..support.threads import Turn

Outputs: TypeAlias = dict[str, torch.Tensor]
"""Tensors by the names of a function's outputs."""

HeldCall: TypeAlias = Callable[[], Outputs]
"""See `Executable.hold`."""


class Memory(NamedTuple):
    """Bytes that an executable takes now, by part. weights: as they are run from, prepared copies
    included. caches: all state buffers. code: the graphs that were made of its functions so far."""

    weights: int
    caches: int
    code: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)


class KernelUse(NamedTuple):
    """How a function runs what it does with weights of few bits.

    what: product, look-up or experts. bits: of the weights. kernel: what runs them; `DECOMPOSED`
    where that is other ops, on the floats that the weights stand for. calls: how many.
    """

    function: str
    what: str
    bits: int
    kernel: str
    calls: int


DECOMPOSED = "decomposed into other ops"


@dataclass(frozen=True)
class Widths:
    """How many tokens T a step may feed.

    each: numbers that are compiled by themselves, ascending. more: whether any number above them
    can be fed, too, and takes no longer for it.
    """

    each: tuple[int, ...] = ()
    more: bool = False

    def holding(self, count: int) -> int:
        """The least that has room for so many tokens; where none has, the most there is."""
        found = next((width for width in self.each if width >= count), None)
        if found is None:
            return count if self.more else self.each[-1]
        return found


ANY = Widths(more=True)
"""Any number of tokens runs as well as any other."""


class Executable(Protocol):
    """A compiled program that owns its state buffers.

    States have rows, those of one class (`State.capacity`) the same number. Which rows are valid,
    and which positions of a text they stand for, callers know.

    A function is fed what `plan.inputs.INPUTS` names and the states that it reads. A step appends T
    rows to every sequence's states after its `past`; rows that the next call's `past` does not
    count are forgotten. It returns ``logits`` [B,S,V] (S = T without ``select``) and, where the
    program has it, ``argmax`` i64[B,S].
    """

    program: Program
    capacity: int
    """Rows that each sequence has room for in every class of states."""
    limit: int
    """Rows that a sequence may have at most: the model's context, and what its widest step, or a
    tree, may reach beyond it."""
    packs: bool
    """Whether every function that runs takes memory for its weights, whoever else has them."""
    preparing: float
    """Seconds spent so far on what is done once: compiling and loading what was first asked for."""
    begun: int
    """Times that `begin` was called: what rows hold of a text is gone when it changes."""
    turn: Turn
    """Held by whoever calls what follows, from `begin` to the last step of a generation."""

    def begin(self, batch: int, rows: int) -> None:
        """Start `batch` new sequences; make room for `rows` cache rows in each at once if cheap."""

    def resume(self, rows: int) -> None:
        """Go on with as many sequences as before, and with what their rows hold; make room for
        `rows` rows at once if cheap."""

    def reserve(self, rows: int, symbol: str | None = None) -> None:
        """Grow the caches to at least `rows` rows a sequence, keeping what they hold: those with
        the capacity `symbol`, or all.

        Errors: `InputError` past the model's context and what a step may be wider.
        """

    def widths(self, function: str) -> Widths:
        """How many tokens a step of the function may feed."""

    def run(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> Outputs:
        """Run a function on CPU inputs; update its states; return the named outputs, on the CPU.

        A returned tensor may be overwritten by the next run of the same function.
        """

    def hold(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> HeldCall:
        """A call that will come again: each time it is made, as `run` on these very tensors.

        The caller writes into the tensors' memory in between, and an executable need not look at
        them again. Where outputs lie on the CPU in the same memory as before, the same dict comes
        back, so whoever reads them through that memory may go on; otherwise another one does.
        Nothing is checked before the first call. A held call does not keep the executable alive.
        """

    def commit(self, states: Collection[str], past: torch.Tensor, source: torch.Tensor) -> None:
        """Keep a path of a step that began at row past[b]: row past[b] + i becomes row past[b] +
        source[b,i]. past i64[B]; source i64[B,N], source[b,i] >= i. Rows after those are undefined.
        """

    def compact(self, states: Collection[str], kept: torch.Tensor) -> None:
        """Keep some rows: row i becomes row kept[b,i]. kept i64[B,N], ascending in each sequence.
        Rows from N on stay as they are: a sequence that keeps all of its rows names the first N.
        """

    def read_rows(
        self, states: Collection[str], sequence: int, start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        """Rows start..stop of one sequence: by state, its type without B, on the CPU, a copy.

        Errors: `InputError` for rows that there are not.
        """

    def write_rows(self, sequence: int, start: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Put what `read_rows` gave into a sequence's rows from `start` on; states that all
        sequences have in common are the same for each.

        Errors: `InputError` for rows that there are not, or of another shape or dtype.
        """

    def scratch(self, owner: Hashable) -> dict[Any, Any]:
        """A dict of the owner's, empty at first, that lives as long as the executable: for what
        takes long to make and serves more than one generation."""

    def state_bytes(self) -> int:
        """Bytes that the state buffers occupy now."""

    def memory(self) -> Memory:
        """Bytes that everything occupies now, by part."""

    def kernels(self) -> tuple[KernelUse, ...]:
        """What runs products with weights of few bits, in the functions that are compiled."""


class Planned:
    """Wraps an executable: another plan, the same graphs and buffers."""

    def __init__(self, executable: Executable, plan: DecodePlan) -> None:
        self.program = executable.program.replace(plan=plan)
        self.executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable, name)
