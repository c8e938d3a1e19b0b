"""What executables of all backends share: a program's states, and what callers keep with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any, Self

import torch

from ..ir import Function, Program, Role
from ..ir.execution.executable import Widths
from ..ir.ops import is_exact_by_row
from ..ir.support.threads import Turn
from .states import StateBuffers
from .target import MOST_COLUMNS, Target


def rounds_activations(function: Function) -> bool:
    """Whether a function rounds what it computes with, so that float error can grow."""
    rounded = function.calls(torch.ops.aten.round.default)
    return bool(rounded) or any(map(is_exact_by_row, function.calls()))


class StatefulExecutable:
    """The part of `ir.executable.Executable` that no backend does differently."""

    packs: bool = False

    def __init__(
        self,
        program: Program,
        target: Target,
        limit: int,
        rounded: Callable[[int], int],
        *,
        queued: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.program, self.target = program, target
        if target.columns is not None:
            rounded = partial(max, limit)
        device = torch.device(target.device)
        self.buffers = StateBuffers(program, device, limit, rounded, queued=queued)
        self.preparing = 0.0
        self.begun = 0
        self.turn = Turn()
        self._kept: dict[Hashable, dict[Any, Any]] = {}
        self._shared: dict[Hashable, dict[Any, Any]] = {}

    def sequences(self, first: int, count: int) -> Self:
        """Some sequences as an executable of its own."""
        part = copy(self)
        part.buffers = self.buffers.sequences(first, count)
        part.begun, part._kept = 0, {}
        part._forget_addresses()
        return part

    def _forget_addresses(self) -> None:
        """This copy has other buffers: drop what is bound to the old ones, do not change it."""

    def _fixed(self, function: str) -> Widths | None:
        """The widths of a function of the target where every step has so many columns."""
        columns = self.target.columns
        if columns is None or self.program.function(function).role is not Role.TARGET:
            return None
        return Widths(tuple(sorted({columns, MOST_COLUMNS})))

    @property
    def capacity(self) -> int:
        """Rows that every class of states has room for now."""
        return self.buffers.capacity

    @property
    def limit(self) -> int:
        """Rows that a sequence may have at most."""
        return self.buffers.limit

    def reserve(self, rows: int, symbol: str | None = None) -> None:
        """Grow the caches, keeping their rows. Errors: `InputError` past what there may be."""
        self.buffers.reserve(rows, symbol)

    def commit(self, states: Collection[str], past: torch.Tensor, source: torch.Tensor) -> None:
        """Keep a path of a step's rows."""
        self.buffers.commit(states, past, source)

    def compact(self, states: Collection[str], kept: torch.Tensor) -> None:
        """Keep some rows, at the front."""
        self.buffers.commit(states, torch.zeros(len(kept), dtype=torch.int64), kept)

    def take_over(
        self,
        states: Collection[str],
        source: Sequence[int],
        start: Sequence[int],
        stop: Sequence[int],
    ) -> None:
        """Sequences go on from others."""
        self.buffers.take_over(states, source, start, stop)

    def read_rows(
        self, states: Collection[str], sequence: int, start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        """Copies of rows."""
        return self.buffers.read_rows(states, sequence, start, stop)

    def write_rows(self, sequence: int, start: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Put rows there."""
        self.buffers.write_rows(sequence, start, rows)

    def scratch(self, owner: Hashable, *, shared: bool = False) -> dict[Any, Any]:
        """A dict that lives as long as the executable."""
        return (self._shared if shared else self._kept).setdefault(owner, {})

    def state_bytes(self) -> int:
        """Bytes of all state buffers (on the CPU, some take memory only once they are written)."""
        return self.buffers.nbytes()
