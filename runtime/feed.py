"""Feeding the step function: ragged token lists in, outputs out, with buffers made once a width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np
import torch

from ..ir import InputError, UnsupportedError
from ..ir.executable import Executable

CHUNK = 512
"""Tokens a prefill feeds at once where every width runs equally well."""


class _Buffers:
    """Inputs of one width, shared with the tensors that the executable reads."""

    def __init__(self, batch: int, width: int, names: frozenset[str]) -> None:
        self.tokens = np.zeros((batch, width), np.int64)
        self.positions = np.zeros((batch, width), np.int64)
        self.past = np.zeros((batch,), np.int64)
        self.offsets = np.arange(width, dtype=np.int64)
        self.column = np.zeros((batch, 1), np.int64)
        arrays = {
            "tokens": self.tokens,
            "positions": self.positions,
            "past": self.past,
            "select": np.tile(self.offsets, (batch, 1)),
        }
        self.inputs = {n: torch.from_numpy(a) for n, a in arrays.items() if n in names}
        self.one_row = dict(self.inputs)
        if "select" in names:
            self.one_row["select"] = torch.from_numpy(self.column)

    def fill(self, rows: Sequence[Sequence[int]], past: Sequence[int]) -> None:
        """Left-align the rows; what is beyond them is garbage that nobody may see: zeros."""
        self.tokens.fill(0)
        for index, row in enumerate(rows):
            self.tokens[index, : len(row)] = row
        self.past[:] = past
        np.add(self.past[:, None], self.offsets, out=self.positions)


class Feeder:
    """Runs the step function of an executable on a batch of ragged chunks.

    seconds: time spent in the executable so far. context: rows that a cache may hold.
    """

    def __init__(self, executable: Executable, batch: int) -> None:
        program = executable.program
        step = program.function("step")
        if not step.has_input("past"):
            raise UnsupportedError(
                f"{program.name} (stage {program.stage}) has no KV cache: run the pass "
                f"insert_kv_cache before generating"
            )
        self.executable, self.batch = executable, batch
        self.context = program.info.context
        known = ("tokens", "positions", "past", "select")
        self.names = frozenset(name for name in known if step.has_input(name))
        self.selects = "select" in self.names
        self.widths = self._usable(executable.widths("step"))
        self.buffers: dict[int, _Buffers] = {}
        self.seconds = 0.0
        self.rows = 0

    def _usable(self, widths: tuple[int, ...] | None) -> tuple[int, ...] | None:
        usable = None if widths is None else tuple(w for w in widths if w <= self.context)
        if usable == ():
            raise InputError(
                f"every compiled width {widths} exceeds the context of {self.context} tokens; "
                f"compile a smaller one"
            )
        return usable

    def begin(self, limit: int, draft: int) -> None:
        """Start new sequences of at most `limit` tokens, fed up to `draft` + 1 at once."""
        widest = self.width(draft + 1, self.context) or 0
        self.rows = min(limit + widest, self.context)
        self.executable.begin(self.batch, self.rows)

    def chunk(self, need: int) -> int:
        """Width of a prefill step when the longest sequence has `need` tokens left."""
        if self.widths is None:
            return min(need, CHUNK, self.context)
        return next((w for w in self.widths if w >= need), self.widths[-1])

    def width(self, need: int, room: int) -> int | None:
        """Width of a decode step that wants `need` columns where `room` cache rows are free.

        The smallest that holds them; else the largest there is room for, and the drafts are cut;
        None if not even the smallest has room.
        """
        if self.widths is None:
            return min(need, room)
        fitting = [w for w in self.widths if w <= room]
        return next((w for w in fitting if w >= need), fitting[-1] if fitting else None)

    def run(
        self,
        rows: Sequence[Sequence[int]],
        past: Sequence[int],
        width: int,
        fetch: Sequence[str],
        column: Sequence[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Feed `rows[b]` (at most `width` tokens) after `past[b]` cache rows.

        Outputs have `width` columns, or with `column` the one column `column[b]`.
        """
        buffers = self.buffers.get(width)
        if buffers is None:
            buffers = self.buffers[width] = _Buffers(self.batch, width, self.names)
        buffers.fill(rows, past)
        self._make_room(max(past) + width)
        inputs: Mapping[str, torch.Tensor] = buffers.inputs
        if column is not None:
            buffers.column[:, 0] = column
            inputs = buffers.one_row
        start = perf_counter()
        outputs = self.executable.run("step", inputs, fetch)
        self.seconds += perf_counter() - start
        if column is None or self.selects:
            return outputs
        sequences, columns = torch.arange(self.batch)[:, None], torch.tensor(column)[:, None]
        return {name: value[sequences, columns] for name, value in outputs.items()}

    def _make_room(self, rows: int) -> None:
        capacity = self.executable.capacity
        if rows <= capacity:
            return
        # Doubling keeps the copying of grown caches linear in the length of the text.
        start = perf_counter()
        self.executable.reserve(max(rows, min(2 * capacity, self.rows)))
        self.seconds += perf_counter() - start
