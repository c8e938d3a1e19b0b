"""The protocol of compiled programs between backends and the runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from ..plan import DecodePlan
from ..program import Program
from ..support.threads import Turn

T = TypeVar("T")

Outputs: TypeAlias = dict[str, torch.Tensor]
"""Tensors by the names of a function's outputs."""

HeldCall: TypeAlias = Callable[[], Outputs]
"""See `Executable.hold`."""


class Memory(NamedTuple):
    """Current bytes of an executable. weights: with prepared copies. caches: all state buffers.
    code: compiled graphs."""

    weights: int
    caches: int
    code: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self)


class KernelUse(NamedTuple):
    """Kernel of a function's calls with quantized weights. what: product, look-up or experts. bits:
    of the weights. kernel: its name; `DECOMPOSED`: other ops on dequantized weights. calls: their
    number."""

    function: str
    what: str
    bits: int
    kernel: str
    calls: int


DECOMPOSED = "decomposed into other ops"


@dataclass(frozen=True)
class Widths:
    """Allowed numbers of tokens T of a step. each: compiled separately, ascending. more: whether
    any larger number runs too, without padding."""

    each: tuple[int, ...] = ()
    more: bool = False

    def holding(self, count: int) -> int:
        """The smallest width >= count; if there is none, the largest."""
        found = next((width for width in self.each if width >= count), None)
        if found is None:
            return count if self.more else self.each[-1]
        return found


ANY = Widths(more=True)
"""No restriction."""


class Executable(Protocol):
    """A compiled program with its state buffers.

    States of one class (`State.capacity`) have the same number of rows. Callers track valid rows
    and their positions.

    A function takes the inputs of `plan.inputs.INPUTS` and its states. A step writes T rows of each
    sequence after its `past`; rows beyond the next call's `past` are dropped. It returns ``logits``
    [B,S,V] (S = T without ``select``) and, if the program has it, ``argmax`` i64[B,S].
    """

    program: Program
    capacity: int
    """Allocated rows per sequence, for every class of states."""
    limit: int
    """Maximum rows of a sequence: the model's context plus the widest step or tree."""
    packs: bool
    """Whether each function that runs has its own copy of its weights."""
    preparing: float
    """Seconds spent on compiling and loading so far."""
    begun: int
    """Number of calls of `begin`; each invalidates all rows."""
    turn: Turn
    """Lock to hold from `begin` to the last step of a generation."""

    def begin(self, batch: int, rows: int) -> None:
        """Start `batch` new sequences. rows: cache rows per sequence to allocate now if cheap."""

    def resume(self, rows: int) -> None:
        """Continue with the same sequences and rows. rows: as in `begin`."""

    def reserve(self, rows: int, symbol: str | None = None) -> None:
        """Grow the caches of the capacity `symbol`, or all, to at least `rows` rows per sequence,
        keeping their contents. Errors: `InputError` beyond `limit`."""

    def sequences(self, first: int, count: int) -> Executable:
        """An executable over sequences first..first + count - 1 of this one, in the same buffers.

        It begins and ends texts of its own: `begin` takes `count`, and neither that nor growing
        touches rows of other sequences. Compiled functions, weights and shared `scratch` are one.
        It is good until `begin` of this one. Run one of them at a time, under this one's `turn`.
        Errors: `InputError` for sequences that there are not; `UnsupportedError` for states that do
        not lie sequence by sequence.
        """

    def widths(self, function: str) -> Widths:
        """Allowed numbers of tokens of a function's step."""

    def run(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> Outputs:
        """Run a function on CPU inputs, update its states, and return the named outputs on the CPU.
        The next run of the function may overwrite them."""

    def hold(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> HeldCall:
        """A prepared call of `run` on these tensors, whose memory the caller overwrites between
        calls.

        It returns the same dict as the call before if the outputs are in the same CPU memory, else
        a new one. Arguments are not checked before the first call. A held call does not keep the
        executable alive.
        """

    def commit(self, states: Collection[str], past: torch.Tensor, source: torch.Tensor) -> None:
        """Keep a path of a tree step that began at row past[b]: row past[b] + i becomes row past[b]
        + source[b,i]. past i64[B]; source i64[B,N], source[b,i] >= i. Later rows are undefined.
        """

    def compact(self, states: Collection[str], kept: torch.Tensor) -> None:
        """Keep some rows: row i becomes row kept[b,i]. kept i64[B,N], ascending. Rows from N on are
        unchanged: a sequence that keeps all its rows gives 0..N-1."""

    def take_over(
        self,
        states: Collection[str],
        source: Sequence[int],
        start: Sequence[int],
        stop: Sequence[int],
    ) -> None:
        """Each sequence b goes on from sequence source[b], as that was before the call: it takes
        over rows start[b]..stop[b] of these states, and all of states without rows of a text
        (recurrences). A sequence that is its own source stays as it is."""

    def read_rows(
        self, states: Collection[str], sequence: int, start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        """Copy rows start..stop of one sequence to the CPU: by state, its type without B. Errors:
        `InputError` for rows out of range."""

    def write_rows(self, sequence: int, start: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Write rows of `read_rows` to a sequence from `start` on. Errors: `InputError` for rows
        out of range, or of another shape or dtype."""

    def scratch(self, owner: Hashable, *, shared: bool = False) -> dict[Any, Any]:
        """The owner's dict, empty at first, that lives as long as the executable: for data that
        several generations use. shared: one for all `sequences` of an executable, for what knows
        nothing of its buffers."""

    def state_bytes(self) -> int:
        """Current bytes of the state buffers."""

    def memory(self) -> Memory:
        """Current bytes, by part."""

    def kernels(self) -> tuple[KernelUse, ...]:
        """Kernels of calls with quantized weights in compiled functions."""


def fact(executable: Executable, find: Callable[[Program], T]) -> T:
    """What `find` says of the executable's program, which stays as it is: found once. Plans may
    differ (`Planned`): it must not look at them."""
    known = executable.scratch(fact, shared=True)
    if find not in known:
        known[find] = find(executable.program)
    found: T = known[find]
    return found


class Planned:
    """An executable with another plan; graphs and buffers are shared."""

    def __init__(self, executable: Executable, plan: DecodePlan) -> None:
        self.program = executable.program.replace(plan=plan)
        self.executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable, name)

    def sequences(self, first: int, count: int) -> Executable:
        """See `Executable.sequences`; with this plan, too."""
        return Planned(self.executable.sequences(first, count), self.program.plan)
