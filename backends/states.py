"""The memory of a program's states, and what may be done with the rows that it holds.

Rows are numbered from 0 in each sequence. Which positions of a text they stand for is not known
here, and neither is how many of them are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from ..ir import LOG, SOURCE, InputError, Program, Sym, TensorType, UnsupportedError
from ..ir.plan.source import EMBEDS
from ..ir.support.memory import free_memory

_ALIGN = 64
_BATCH = Sym("B")
_PARTS = 8
_SMALL = 64 << 20
"""States that are alike lie together in at most so many tensors, each of so many bytes where that
is possible: one op moves the rows of all in a tensor, and while one is replaced by a larger one,
both take memory."""


@dataclass
class _Group:
    """States of one type with the same readers, which lie in one tensor, data [states, *dims]."""

    type: TensorType
    symbol: str | None
    names: list[str]
    data: torch.Tensor

    @property
    def together(self) -> bool:
        """Whether all sequences have the states in common."""
        return _BATCH not in self.type.dims

    @property
    def batch_axis(self) -> int:
        """The axis of `data` that counts sequences, which have states of their own."""
        return self.type.dims.index(_BATCH) + 1

    @property
    def row_axis(self) -> int:
        """The axis of `data` that counts rows."""
        return self.type.dims.index(Sym(str(self.symbol))) + 1

    @property
    def own_row_axis(self) -> int:
        """The axis of rows in what one sequence has of a state."""
        return self.row_axis - 1 - (not self.together and self.row_axis > self.batch_axis)

    def of(self, states: Collection[str]) -> list[torch.Tensor]:
        """What these states hold of `data`, [some, *dims]: one tensor if it is all of it."""
        if all(name in states for name in self.names):
            return [self.data]
        places = [place for place, name in enumerate(self.names) if name in states]
        return [self.data[place : place + 1] for place in places]


class StateBuffers:
    """Owns the memory of a program's states; errors are `InputError`.

    limit: rows that a sequence may have at most, in states that steps write. rounded: the capacity
    to make for so many rows, if the limit allows it (it must not hold the executable).
    queued: where what is done with them is queued, on a device that works by itself. epoch: changes
    whenever addresses or sizes do. capacities: rows that each class of states has room for, by its
    symbol. tensors: the states by name, none of them a view, which compilers would look behind.
    rewritten: those that a step replaces, instead of adding rows to them. whole: off while memory
    is taken; if that was interrupted, the next texts begin with new memory.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        limit: int,
        rounded: Callable[[int], int],
        *,
        queued: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.queued = queued
        self.device, self.limit, self.rounded = device, limit, rounded
        self.context = program.info.context
        self.batch = self.epoch = 0
        self.whole = True
        self.tensors: dict[str, torch.Tensor] = {}
        self.spares: dict[str, torch.Tensor] = {}
        self.capacities = {s.capacity: 0 for s in program.states.values() if s.capacity}
        if LOG in self.capacities:
            self.capacities[LOG] = 1
        self.rewritten = {name for name, state in program.states.items() if state.recurrent}
        # Classes without a row for every row of a text, which a plan's cache policy may want.
        self.held = program.plan.cache.held
        rows, given = program.plan.source.rows, EMBEDS in program.states
        self.source = max(rows, self.context) if given else rows
        wholes = ((name, program.whole_rows(name)) for name in program.functions)
        self.apart = {name: symbol for name, symbol in wholes if symbol is not None}
        self.groups = self._groups(program)
        self.parts: WeakSet[SomeSequences] = WeakSet()

    def sequences(self, first: int, count: int) -> SomeSequences:
        """See `Executable.sequences`."""
        part = SomeSequences(self, first, count)
        self.parts.add(part)
        return part

    def _groups(self, program: Program) -> list[_Group]:
        alike: dict[object, list[str]] = {}
        for name, state in program.states.items():
            readers = tuple(f.name for f in program.functions.values() if f.has_input(name))
            alike.setdefault((readers, state.type), []).append(name)
        full = {"B": 1, **{symbol: self._wanted(self.limit, symbol) for symbol in self.capacities}}
        groups = []
        for names in alike.values():
            state = program.states[names[0]]
            nbytes = len(names) * state.type.bind(full).nbytes
            parts = max(1, min(_PARTS, -(-nbytes // _SMALL)))
            each = -(-len(names) // parts)
            nothing = torch.empty(0, dtype=state.type.dtype)
            for start in range(0, len(names), each):
                some = names[start : start + each]
                groups.append(_Group(state.type, state.capacity, some, nothing))
        return groups

    @property
    def capacity(self) -> int:
        """Rows of a text that every class of states has room for."""
        fits = [self._fits(symbol, n) for symbol, n in self.capacities.items()]
        sizes = [rows for rows in fits if rows is not None]
        return min(sizes, default=self.limit if self.batch else 0)

    def room(self, function: str) -> int:
        """Rows of a text that the states of a function have room for, and others that change with
        them."""
        symbol = self.apart.get(function)
        return self.capacity if symbol is None else self.capacities[symbol]

    def _most(self, symbol: str | None) -> int:
        """Rows that a class of states, or all that steps write, may have."""
        return self.source if symbol == SOURCE else self.limit

    def _fits(self, symbol: str, capacity: int) -> int | None:
        if symbol in (LOG, SOURCE):
            return None
        return self.held[symbol].fits(capacity) if symbol in self.held else capacity

    def _wanted(self, rows: int, symbol: str) -> int:
        """The capacity of a class for so many rows of a sequence."""
        if symbol in (LOG, SOURCE):
            return self.capacities[symbol]
        held = self.held.get(symbol)
        wanted = self.rounded(rows) if held is None else held.capacity(rows, self.rounded)
        return min(wanted, self.limit)

    @property
    def sizes(self) -> dict[str, int]:
        """The values of the symbols in the states' types."""
        return {"B": self.batch, **self.capacities}

    def begin(self, batch: int, rows: int, *, anew: bool) -> None:
        """Make room for new sequences; what the buffers held is forgotten (but stays finite).

        anew: take new memory, of no more than `rows` rows, also where there is enough.
        """
        anew = anew or batch != self.batch or not self.whole
        self.whole = False
        self.batch = batch
        kept = {s: 0 if anew and s != LOG else n for s, n in self.capacities.items()}
        wanted = {symbol: max(n, self._wanted(rows, symbol)) for symbol, n in kept.items()}
        if anew or wanted != self.capacities:
            self.capacities = wanted
            self._allocate(self.groups, {})
        self.whole = True

    def reserve(self, rows: int, symbol: str | None = None) -> None:
        """Grow to at least `rows` rows, keeping contents: one class of states, or every one (those
        of the last rows no further than to all that they hold)."""
        if symbol is not None and symbol not in self.capacities:
            raise InputError(f"no state has the capacity {symbol}; there are {self.capacities}")
        if rows > self._most(symbol):
            raise InputError(
                f"{rows} cache rows asked for; with a context of {self.context} tokens a cache has "
                f"{self._most(symbol)} rows at most"
            )
        wanted = {s: self._wanted(rows, s) for s in self.capacities}
        if symbol is not None:
            # All of a log is looked at in every step: no row more than there is need.
            whole = rows if symbol == LOG else self.rounded(rows)
            wanted = {symbol: min(whole, self._most(symbol))}
        small = {s: self.capacities[s] for s, n in wanted.items() if self.capacities[s] < n}
        if small:
            self.whole = False
            self.capacities = {**self.capacities, **{s: wanted[s] for s in small}}
            self._allocate([g for g in self.groups if g.symbol in small], small)
            self.whole = True

    def _allocate(self, groups: Collection[_Group], kept: Mapping[str, int]) -> None:
        """New memory for these groups, with so many rows of the old."""
        self._check_memory(groups)
        with self.queued():
            for group in groups:
                self._take_memory(group, kept.get(str(group.symbol), 0))
        self.spares = {}
        self.epoch += 1
        for part in list(self.parts):
            part.follow()

    def _check_memory(self, groups: Collection[_Group]) -> None:
        """Errors: `InputError` for more than is free; it is taken bit by bit, while texts grow."""
        held = sum(group.data.nbytes for group in groups)
        wanted = sum(len(g.names) * g.type.bind(self.sizes).nbytes for g in groups) - held
        if self.device.type == "cpu" and wanted > _SMALL and wanted > (free := free_memory()):
            raise InputError(
                f"the caches of {self.batch} texts of {max(self.capacities.values(), default=0)} "
                f"tokens take {wanted / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free: "
                f"ask for fewer new tokens (max_new_tokens), or cache them in fewer bits (recipe "
                f"kv_int8)"
            )

    def _take_memory(self, group: _Group, rows: int) -> None:
        bound = group.type.bind(self.sizes)
        # One unit at least: a dtype needs a stride of whole values, of no rows, too.
        room = max(-(-bound.nbytes // _ALIGN), 1) * _ALIGN
        memory = self._zeros(len(group.names), room)
        data = memory[:, : bound.nbytes].view(bound.dtype).view(len(group.names), *bound.shape)
        self.tensors.update(zip(group.names, map(_no_view, data, memory), strict=True))
        if rows:
            data.narrow(group.row_axis, 0, rows).copy_(group.data)
        group.data = data

    def spare(self, name: str) -> torch.Tensor:
        """Memory for the next value of a state, for whoever cannot write into it at once."""
        if name not in self.spares:
            self.spares[name] = torch.empty_like(self.tensors[name])
        return self.spares[name]

    def _zeros(self, count: int, room: int) -> torch.Tensor:
        """Zeros u8[count, room] that take memory only where they are touched (on the CPU)."""
        if self.device.type != "cpu":
            return torch.zeros((count, room), dtype=torch.uint8, device=self.device)
        raw = torch.from_numpy(np.zeros(count * room + _ALIGN, dtype=np.uint8))
        start = -raw.data_ptr() % _ALIGN
        return raw[start : start + count * room].view(count, room)

    def commit(self, states: Collection[str], past: torch.Tensor, source: torch.Tensor) -> None:
        """See `Executable.commit`."""
        with self.queued():
            for sequence, path in enumerate(zip(past.tolist(), source.tolist(), strict=True)):
                self._move(states, sequence, *path)

    def _move(self, states: Collection[str], sequence: int, past: int, path: list[int]) -> None:
        first = next((step for step, row in enumerate(path) if step != row), None)
        if first is None:  # rows before the first of them stay where they are
            return
        start, rows = past + first, [past + row for row in path[first:]]
        index = torch.tensor(rows, device=self.device)
        for group in self.groups:
            if group.symbol in (None, SOURCE) or group.together:
                continue  # what texts are written from has no row of a token of theirs
            axis = group.own_row_axis + 1
            for data in group.of(states):
                mine = data.select(group.batch_axis, sequence)
                mine.narrow(axis, start, len(rows)).copy_(mine.index_select(axis, index))

    def take_over(
        self,
        states: Collection[str],
        source: Sequence[int],
        start: Sequence[int],
        stop: Sequence[int],
    ) -> None:
        """See `Executable.take_over`."""
        moved = [(b, one) for b, one in enumerate(source) if b != one]
        with self.queued():
            for group in self.groups:
                if group.together or not moved:
                    continue
                for data in group.of(states):
                    # Copies first: what one takes over another may give up.
                    taken = [self._span(group, data, one, start[b], stop[b]) for b, one in moved]
                    taken = [rows.clone() for rows in taken]
                    for (b, _), rows in zip(moved, taken, strict=True):
                        self._span(group, data, b, start[b], stop[b]).copy_(rows)

    def _span(
        self, group: _Group, data: torch.Tensor, sequence: int, start: int, stop: int
    ) -> torch.Tensor:
        """Rows of a sequence in states of a group, or all of it where rows are not of a text."""
        mine = data.select(group.batch_axis, sequence)
        if group.symbol in (None, LOG):
            return mine
        return mine.narrow(group.own_row_axis + 1, start, max(stop - start, 0))

    def read_rows(
        self, states: Collection[str], sequence: int, start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        """See `Executable.read_rows`."""
        with self.queued():
            return {
                name: self._rows(group, place, sequence, start, stop).cpu().clone()
                for group in self.groups
                for place, name in enumerate(group.names)
                if name in states and group.symbol not in (None, SOURCE)
            }

    def write_rows(self, sequence: int, start: int, rows: Mapping[str, torch.Tensor]) -> None:
        """See `Executable.write_rows`."""
        if unknown := sorted(set(rows) - {n for g in self.groups if g.symbol for n in g.names}):
            raise InputError(f"no state with rows is called {', '.join(unknown)}")
        for group in self.groups:
            for place, name in enumerate(group.names):
                if name in rows:
                    stop = start + rows[name].shape[group.own_row_axis]
                    there = self._rows(group, place, sequence, start, stop)
                    _check_alike(name, rows[name], there)
                    with self.queued():
                        there.copy_(rows[name])

    def _rows(
        self, group: _Group, place: int, sequence: int, start: int, stop: int
    ) -> torch.Tensor:
        """A view of the rows of one sequence, or of all, in one state, [*dims] without B."""
        capacity = self.capacities[str(group.symbol)]
        if not (0 <= sequence < self.batch and 0 <= start <= stop <= capacity):
            raise InputError(
                f"rows {start} to {stop} of sequence {sequence}: there are {self.batch} sequences "
                f"of {capacity} rows"
            )
        whole = group.data[place]
        if not group.together:
            whole = whole.select(group.batch_axis - 1, sequence)
        return whole.narrow(group.own_row_axis, start, stop - start)

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(group.data.nbytes for group in self.groups)


class SomeSequences(StateBuffers):
    """Sequences first..first + batch - 1 of other buffers, whose memory they share."""

    def __init__(self, whole: StateBuffers, first: int, count: int) -> None:
        if not 0 <= first < first + count <= whole.batch:
            raise InputError(
                f"sequences {first} to {first + count}: there are {whole.batch} sequences"
            )
        self.__dict__.update(whole.__dict__)
        self.all, self.first, self.batch, self.parts = whole, first, count, WeakSet()
        self.follow()

    def follow(self) -> None:
        """The others have other memory: so have these."""
        if self.first + self.batch > self.all.batch:
            return  # they have begun anew, with fewer
        self.capacities, self.epoch, self.spares = self.all.capacities, self.all.epoch, {}
        self.groups = [replace(group, data=self._own(group)) for group in self.all.groups]
        self.tensors = {
            name: self.all.tensors[name] if group.together else _alone(name, group.data[place])
            for group in self.groups
            for place, name in enumerate(group.names)
        }
        for part in list(self.parts):
            part.follow()

    def _own(self, group: _Group) -> torch.Tensor:
        if group.together:
            return group.data
        return group.data.narrow(group.batch_axis, self.first, self.batch)

    def begin(self, batch: int, rows: int, *, anew: bool) -> None:
        """Make room for new texts; other sequences keep theirs."""
        if batch != self.batch:
            raise InputError(f"{batch} texts begin in the places of {self.batch} sequences")
        self.reserve(rows)

    def reserve(self, rows: int, symbol: str | None = None) -> None:
        """Grow the buffers of all sequences, keeping contents."""
        self.all.reserve(rows, symbol)


def _alone(name: str, data: torch.Tensor) -> torch.Tensor:
    """Some sequences of a state as a tensor that is no view. Errors: `UnsupportedError`."""
    if not data.is_contiguous():
        raise UnsupportedError(f"state {name}: its sequences do not lie one behind the other")
    return _no_view(data, data.view(-1).view(torch.uint8))


def _no_view(data: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor for data, which begins its memory, that has a storage of its own."""
    storage = from_dlpack(memory).untyped_storage()
    alone = torch.empty(0, dtype=data.dtype, device=data.device)
    return alone.set_(storage, 0, data.shape, data.stride())


def _check_alike(name: str, given: torch.Tensor, there: torch.Tensor) -> None:
    if given.shape != there.shape or given.dtype != there.dtype:
        raise InputError(
            f"rows for {name}: expected {TensorType.of(there)}, got {TensorType.of(given)}"
        )
