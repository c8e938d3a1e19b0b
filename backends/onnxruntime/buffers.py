"""State buffers that every session of an executable reads and writes in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...ir import InputError, State, Sym, TensorType
from .attention import OVERHANG

GRAIN = 64
"""Capacities are multiples of this many rows (or the limit)."""

_ALIGN = 64
_ROWS, _BATCH = Sym("C"), Sym("B")


@dataclass
class _Group:
    """All states of one type with the same readers, in one tensor [states, *dims]: one op moves the
    rows of all layers."""

    readers: tuple[str, ...]
    type: TensorType
    names: list[str]
    data: torch.Tensor

    @property
    def row_axis(self) -> int | None:
        """The axis of `data` that counts cache rows."""
        return self.type.dims.index(_ROWS) + 1 if _ROWS in self.type.dims else None


class StateBuffers:
    """Owns the memory of a program's states. `epoch` changes whenever addresses or sizes do."""

    def __init__(
        self,
        states: Mapping[str, State],
        readers: Mapping[str, tuple[str, ...]],
        context: int,
        device: str,
    ) -> None:
        self.device = device
        self.limit = context + OVERHANG
        self.batch = 0
        self.capacity = 0
        self.epoch = 0
        alike: dict[tuple[tuple[str, ...], TensorType], list[str]] = {}
        for name, state in states.items():
            alike.setdefault((readers[name], state.type), []).append(name)
        self.groups = [
            _Group(functions, type, names, torch.empty(0, dtype=type.dtype))
            for (functions, type), names in alike.items()
        ]
        self.tensors: dict[str, torch.Tensor] = {}

    def begin(self, batch: int, rows: int) -> None:
        """Make room for new sequences; what the buffers held is forgotten (but stays finite)."""
        if batch != self.batch:
            self.batch, self.capacity = batch, 0
            self._allocate(self._rounded(rows), keep=False)
        elif rows > self.capacity:
            self._allocate(self._rounded(rows), keep=False)

    def reserve(self, rows: int) -> None:
        """Grow to at least `rows` rows, keeping contents. Errors: `InputError` past the context."""
        if rows > self.limit:
            raise InputError(
                f"{rows} cache rows asked for; the model's context has {self.limit - OVERHANG}"
            )
        if rows > self.capacity:
            half_more = min(self.capacity + self.capacity // 2, self.limit)
            self._allocate(self._rounded(max(rows, half_more)), keep=True)

    def _rounded(self, rows: int) -> int:
        return min(-(-max(rows, 1) // GRAIN) * GRAIN, self.limit)

    def _allocate(self, capacity: int, keep: bool) -> None:
        for group in self.groups:
            bound = group.type.bind({"B": self.batch, "C": capacity})
            fresh = self._zeros((len(group.names), *bound.shape), bound.dtype)
            axis = group.row_axis
            if keep and axis is not None:
                fresh.narrow(axis, 0, self.capacity).copy_(group.data)
            elif keep:
                fresh = group.data
            group.data = fresh
            self.tensors.update(zip(group.names, fresh.unbind(), strict=True))
        self.capacity = capacity
        self.epoch += 1

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros that take memory only where they are touched (on the CPU)."""
        if self.device != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        size = math.prod(shape) * dtype.itemsize
        raw = torch.from_numpy(np.zeros(size + _ALIGN, dtype=np.uint8))
        start = -raw.data_ptr() % _ALIGN
        return raw[start : start + size].view(dtype).reshape(shape)

    def keep_rows(self, function: str, past: torch.Tensor, source: torch.Tensor) -> None:
        """Row past[b] + i becomes row past[b] + source[b,i], in every state with rows."""
        groups = [g for g in self.groups if function in g.readers and g.row_axis is not None]
        for sequence, (start, path) in enumerate(zip(past.tolist(), source.tolist(), strict=True)):
            moved = [step for step, row in enumerate(path) if step != row]
            if moved:  # rows before the first of them stay where they are
                first = moved[0]
                self._move(groups, sequence, start + first, [start + row for row in path[first:]])

    def _move(self, groups: list[_Group], sequence: int, start: int, rows: list[int]) -> None:
        for group in groups:
            assert group.row_axis is not None
            batch_axis = group.type.dims.index(_BATCH) + 1
            mine = group.data.select(batch_axis, sequence)
            axis = group.row_axis - (group.row_axis > batch_axis)
            index = torch.tensor(rows, device=mine.device)
            mine.narrow(axis, start, len(rows)).copy_(mine.index_select(axis, index))

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(group.data.nbytes for group in self.groups)
