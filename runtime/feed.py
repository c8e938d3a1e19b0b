"""Feeding the step function: ragged token lists in, outputs out, with buffers made once a width."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..ir import InputError, UnsupportedError
from ..ir.executable import Executable
from .draft import Draft, Topology

CHUNK = 512
"""Tokens a prefill feeds at once where every width runs equally well."""

CHOSEN = frozenset({"logits", "argmax", "top_tokens"})
"""Outputs that are wanted of chosen tokens only, whether the step can choose or not."""


class _Buffers:
    """Inputs of one width, and the memory behind them to write lists into.

    A step's lists are short: writing them through memoryviews costs a third of what numpy does
    right after a model has run through the processor's caches.
    """

    def __init__(self, batch: int, width: int, names: frozenset[str]) -> None:
        self.batch, self.width = batch, width
        every = torch.arange(width).repeat(batch, 1)
        tensors = {"tokens": every.clone(), "positions": every.clone(), "select": every}
        tensors["past"] = torch.zeros(batch, dtype=torch.int64)
        column = torch.zeros(batch, 1, dtype=torch.int64)
        self.tokens, self.positions = _memory(tensors["tokens"]), _memory(tensors["positions"])
        self.past, self.column = _memory(tensors["past"]), _memory(column)
        self.garbage = memoryview(array("q", [0] * width))
        self.inputs = {name: tensor for name, tensor in tensors.items() if name in names}
        picked = {"select": column} if "select" in names else {}
        self.one_row = {**self.inputs, **picked}
        self.branched: dict[str, torch.Tensor] = {}
        self.shapes: list[Topology | None] = [None] * batch

    def fill(self, rows: Sequence[Sequence[int]], past: Sequence[int]) -> None:
        """Left-align the rows; what is beyond them is garbage that nobody may see: zeros."""
        width, begin = self.width, 0
        for index, row in enumerate(rows):
            middle, end = begin + len(row), begin + width
            self.tokens[begin:middle] = array("q", row)
            if middle < end:
                self.tokens[middle:end] = self.garbage[: end - middle]
            self.past[index] = past[index]
            begin = end

    def chains(
        self, past: Sequence[int], column: Sequence[int] | None
    ) -> Mapping[str, torch.Tensor]:
        """Inputs for rows that are chains, after `fill`; with `column`, one is chosen of each."""
        width = self.width
        for index, start in enumerate(past):
            begin = index * width
            self.positions[begin : begin + width] = array("q", range(start, start + width))
        if column is None:
            return self.inputs
        self.column[:] = array("q", column)
        return self.one_row

    def trees(self, past: Sequence[int], drafts: Sequence[Draft]) -> Mapping[str, torch.Tensor]:
        """Inputs for trees, after `fill`: positions by depth, and who continues whom.

        A column that no node fills continues nothing: it sees the past and itself.
        """
        if not self.branched:
            ancestors = torch.empty(self.batch, self.width, self.width, dtype=torch.bool)
            self.branched = {**self.inputs, "ancestors": ancestors}
            self.seen, self.alone = ancestors.numpy(), np.eye(self.width, dtype=np.bool_)
        for index, (start, draft) in enumerate(zip(past, drafts, strict=True)):
            shape = draft.shape
            depths, begin = shape.depths, index * self.width
            after = [start] * (self.width - 1 - len(depths))
            row = array("q", [start, *[start + depth for depth in depths], *after])
            self.positions[begin : begin + self.width] = row
            if shape is not self.shapes[index]:
                size = len(depths) + 1
                self.seen[index] = self.alone
                self.seen[index, :size, :size] = shape.ancestors
                self.shapes[index] = shape
        return self.branched


_BUFFERS: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], _Buffers]] = (
    weakref.WeakKeyDictionary()
)
"""Buffers by batch and width: they outlive a generation, because making them takes as long as a few
steps."""


def _memory(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous int64 tensor, to be read and written."""
    return tensor.view(-1).numpy().data.cast("B").cast("q")


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
        self.buffers = _BUFFERS.setdefault(executable, {})
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
        chosen = None
        for width in self.widths:
            if width > room:
                break
            chosen = width
            if width >= need:
                break
        return chosen

    def run(
        self,
        rows: Sequence[Sequence[int]],
        past: Sequence[int],
        width: int,
        fetch: Sequence[str],
        column: Sequence[int] | None = None,
        trees: Sequence[Draft] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Feed `rows[b]` (at most `width` tokens) after `past[b]` cache rows.

        Values a chosen token (dim S) have `width` columns, or with `column` the one column
        `column[b]`; values a fed token (dim T) have all. trees: the drafts of which `rows` are the
        last committed token and the nodes, if one of them branches.
        """
        key = (self.batch, width)
        buffers = self.buffers.get(key)
        if buffers is None:
            buffers = self.buffers[key] = _Buffers(*key, self.names)
        buffers.fill(rows, past)
        self._make_room(max(past) + width)
        inputs = buffers.chains(past, column) if trees is None else buffers.trees(past, trees)
        start = perf_counter()
        outputs = self.executable.run("step", inputs, fetch)
        self.seconds += perf_counter() - start
        if column is None or self.selects:
            return outputs
        sequences, columns = torch.arange(self.batch)[:, None], torch.tensor(column)[:, None]
        return {
            name: value[sequences, columns] if name in CHOSEN else value
            for name, value in outputs.items()
        }

    def keep(self, past: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commit accepted paths of the last step: their rows move to the front of its rows."""
        longest = max(map(len, paths))
        # Columns: the root is 0, node i is i + 1. Rows after a path's own stay where they are.
        source = [
            [0, *(node + 1 for node in path), *range(len(path) + 1, longest + 1)] for path in paths
        ]
        if all(row == list(range(longest + 1)) for row in source):
            return
        start = perf_counter()
        self.executable.keep_rows("step", torch.tensor(list(past)), torch.tensor(source))
        self.seconds += perf_counter() - start

    def _make_room(self, rows: int) -> None:
        capacity = self.executable.capacity
        if rows <= capacity:
            return
        # Doubling keeps the copying of grown caches linear in the length of the text.
        start = perf_counter()
        self.executable.reserve(max(rows, min(2 * capacity, self.rows)))
        self.seconds += perf_counter() - start
