"""A draft function's own cache: ragged rows in, outputs of chosen columns out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ...ir import UnsupportedError, type_of
from ...ir.execution.executable import Executable
from ...ir.plan.inputs import ANCESTORS, BEFORE, INPUTS, OPTIONAL, SEEN
from ..feeding.calls import Calls
from ..feeding.feed import CHUNK
from ..feeding.gather import gathered, written

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

CHOSEN = ("draft_tokens", "draft_scores", "draft_logits")
"""What functions that draft give of chosen columns only, where they take ``select``; one with
``draft_odds`` gives those so, too."""

STATES = ("hidden", "ahead", "joined")
"""What functions that draft give of every token."""

HELD = 128
"""Tokens up to which the inputs of a shape are kept for the next call; prompts are longer."""


class DraftInputs:
    """Inputs of one shape, in memory that drafts are written into, and the calls that read it."""

    def __init__(
        self, executable: Executable, function: str, shape: tuple[int, int, int], trees: bool
    ) -> None:
        sizes = dict(zip("BTS", shape, strict=True))
        self.inputs: dict[str, torch.Tensor] = {}
        for node in executable.program.function(function).inputs:
            name, bound = str(node.target), type_of(node)
            if name in INPUTS and (trees or name not in OPTIONAL):
                bound = bound.bind(sizes)
                self.inputs[name] = torch.zeros(bound.shape, dtype=bound.dtype)
        self.ids = {n: t.numpy() for n, t in self.inputs.items() if n != "hidden"}
        self.calls = Calls((function,), self.inputs)

    def fill(
        self, given: Mapping[str, Any], hidden: torch.Tensor | None, ancestors: Flags | None
    ) -> None:
        """Write a draft's values, left-aligned; what is behind them is never read. given: of the
        other inputs, by name; see `DraftCache.run`."""
        count = given["tokens"].shape[1]
        for name, values in given.items():
            if name not in self.ids:
                continue
            if name in ("tokens", "positions", SEEN, BEFORE):
                self.ids[name][:, :count], self.ids[name][:, count:] = values, 0
            else:
                self.ids[name][:] = values
        if ancestors is not None:
            seen = self.ids[ANCESTORS]
            seen[:] = np.eye(seen.shape[1], dtype=np.bool_)
            seen[:, :count, :count] = ancestors
        if hidden is not None:
            written(self.inputs["hidden"], hidden)


@dataclass(frozen=True)
class DraftCall:
    """A call of a draft function: see `DraftCache.run`."""

    tokens: Ids
    positions: Ids
    past: Sequence[int]
    select: Ids
    hidden: torch.Tensor | None = None
    ancestors: Flags | None = None
    seen: Ids | None = None
    before: Ids | None = None
    silent: bool = False

    @classmethod
    def of(cls, calls: Sequence[DraftCall]) -> DraftCall:
        """Calls of the same inputs as one; what is shorter than others is filled up behind."""
        made: dict[str, Any] = {name: _filled(calls, name) for name in FED}
        if made["ancestors"] is not None:
            for one, call in zip(made["ancestors"], calls, strict=True):
                own = call.tokens.shape[1]
                one[own:, own:] = np.eye(len(one) - own, dtype=np.bool_)
        past = [rows for call in calls for rows in call.past]
        return cls(**made, past=past, silent=calls[0].silent)

    @property
    def absent(self) -> tuple[str, ...]:
        """The inputs that it has not."""
        return tuple(name for name in FED if getattr(self, name) is None)


FED = ("tokens", "positions", "select", "hidden", "ancestors", "seen", "before")
"""What has a row for each sequence, and along all other axes but the last ones its columns."""


def _filled(calls: Sequence[DraftCall], name: str) -> Any:
    """The values of several calls on top of each other, with zeros behind the shorter ones."""
    values = [getattr(call, name) for call in calls]
    if values[0] is None:
        return None
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    shape[0] = len(values)
    first = values[0]
    filled = (
        first.new_zeros(shape) if isinstance(first, torch.Tensor) else np.zeros(shape, first.dtype)
    )
    for row, value in zip(filled, values, strict=True):
        row[tuple(map(slice, value.shape[1:]))] = value[0]
    return filled


class DraftCache:
    """Runs a function with caches. It knows nothing of what the rows mean; row r holds position r.

    ahead: rows that the function makes for itself beyond those of what it is fed. widest: tokens
    that may be fed at once. joined: what makes a call together with those of other texts, or
    returns None. Errors: `UnsupportedError` for a function without a cache.
    """

    joined: ClassVar[Callable[[DraftCache, DraftCall], dict[str, torch.Tensor] | None] | None] = (
        None
    )

    def __init__(self, executable: Executable, function: str, *, ahead: int = 0) -> None:
        fn = executable.program.function(function)
        if not fn.has_input("past"):
            raise UnsupportedError(
                f"the draft function {function} has no KV cache: run the pass insert_kv_cache "
                f"after the one that makes it"
            )
        self.executable, self.function, self.ahead = executable, function, ahead
        self.takes = {str(node.target) for node in fn.inputs}
        self.fetch = tuple(name for name in (*CHOSEN, "draft_odds", *STATES) if name in fn.outputs)
        self.widths = executable.widths(function)
        # Where the target's rows are dropped, those of drafts have room of their own.
        self.apart, self.room = executable.program.whole_rows(function), 0
        self.widest = CHUNK if self.widths.more else self.widths.each[-1]

    def run(
        self,
        tokens: Ids,
        positions: Ids,
        past: Sequence[int],
        select: Ids,
        hidden: torch.Tensor | None = None,
        ancestors: Flags | None = None,
        *,
        seen: Ids | None = None,
        before: Ids | None = None,
        silent: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Feed tokens i64[B,N] after `past[b]` rows; outputs of the columns `select` i64[B,S].

        hidden: f[B,N,H], seen: i64[B,N], before: i64[B,N,2], if the function takes them. ancestors:
        bool[B,N,N]; None: a chain. silent: only the rows are wanted. What the rows after a
        sequence's own hold must not matter.
        """
        call = DraftCall(tokens, positions, past, select, hidden, ancestors, seen, before, silent)
        made = None if DraftCache.joined is None else DraftCache.joined(self, call)
        return self.make(call) if made is None else made

    def make(self, asked: DraftCall) -> dict[str, torch.Tensor]:
        """Make a call by itself."""
        (batch, count), select, ancestors = asked.tokens.shape, asked.select, asked.ancestors
        width = self.widths.holding(count)
        if ancestors is not None and ANCESTORS not in self.takes:
            raise UnsupportedError(
                f"the draft function {self.function} takes no ancestors, so it cannot draft trees: "
                f"run the pass accept_trees, or draft a chain"
            )
        rows = max(asked.past) + width + self.ahead
        if self.apart is None and rows > self.executable.capacity:
            self.executable.reserve(rows)
        elif self.apart is not None and rows > self.room:
            # Doubling keeps the copying of grown caches linear in the length of the text.
            self.room = max(rows, min(2 * self.room, self.executable.limit))
            self.executable.reserve(self.room, self.apart)
        call = self._call(batch, width, select.shape[1], ancestors is not None)
        given = {name: getattr(asked, name) for name in ("tokens", "positions", "past", "select")}
        given |= {} if asked.seen is None else {SEEN: asked.seen}
        given |= {} if asked.before is None else {BEFORE: asked.before}
        call.fill(given, asked.hidden, ancestors)
        fetch = () if asked.silent else self.fetch
        if count > HELD:
            outputs: Mapping[str, torch.Tensor] = self.executable.run(
                self.function, call.inputs, fetch
            )
        else:
            outputs = call.calls.fetching(self.executable, fetch)()
        whole = STATES if "select" in self.takes else self.fetch
        return {n: gathered(v, select) if n in whole else v for n, v in outputs.items()}

    def _call(self, batch: int, width: int, chosen: int, trees: bool) -> DraftInputs:
        """The inputs of a shape: the same every time, if it is one of drafts."""
        known: dict[tuple[Any, ...], DraftInputs] = self.executable.scratch(DraftCache)
        key = (self.function, batch, width, chosen, trees)
        call = known.get(key)
        if call is None:
            call = DraftInputs(self.executable, self.function, key[1:4], trees)
            if width <= HELD:
                known[key] = call
        return call

    def blank(self, batch: int, width: int, function: str) -> torch.Tensor:
        """Zeros for a function's input ``hidden``, f[B,W,H]: `width` tokens are fed as W."""
        type = type_of(self.executable.program.function(function).input("hidden"))
        bound = type.bind({"B": batch, "T": self.widths.holding(width)})
        return torch.zeros(bound.shape, dtype=bound.dtype)
