"""Where functions write the rows of caches that attention reads, as they are or in few bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx

from ...ir import Function, Program, arguments
from ...ir.ops.attention import SPANS
from ..engine.feed import watched

A, G = torch.ops.aten, torch.ops.graftwork
ATTENDS = (G.attend.default, G.attend_quantized.default)
"""Attention over caches."""


_REACHES = {"window": "a sliding window of {} positions", "chunk": "chunks of {} positions"}


def reach_of(mask: torch.fx.Node) -> str:
    """What the tokens of a step mask see, for messages; nothing where that is all before them."""
    if mask.target is not G.step_mask.default:
        return ""
    found = {name: arguments(mask)[name] for name in SPANS}
    return " and ".join(_REACHES[name].format(size) for name, size in found.items() if size)


def window_of(attend: torch.fx.Node) -> int | None:
    """How many positions back an attention sees at most, itself included; None: all."""
    mask = arguments(attend)["mask"]
    found: int | None = None
    if isinstance(mask, torch.fx.Node) and mask.target is G.step_mask.default:
        found = arguments(mask)["window"]
    return found


def scored(attend: torch.fx.Node) -> dict[str, Any]:
    """Scale and softcap of an attention, where it has one."""
    given = arguments(attend)
    return {n: given[n] for n in ("scale", "softcap") if given.get(n) is not None}


@dataclass(frozen=True)
class CachedRows:
    """A layer's keys, or its values. writes: the calls that write their parts: the rows, or codes
    and steps of them."""

    writes: tuple[torch.fx.Node, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of their states."""
        return tuple(str(write.args[0].target) for write in self.writes)  # type: ignore[union-attr]

    @property
    def new(self) -> Any:
        """What is written of a step, before it is stored in few bits, or for every head."""
        made: Any = self.writes[0].args[1]
        if made.target is A.reshape.default and made.args[0].target is A.expand.default:
            made = made.args[0].args[0].args[0]  # see `by_query_head`
        stored = made.args[0] if len(self.writes) > 1 else None
        return made if stored is None else stored.args[0]


@dataclass(frozen=True)
class Written:
    """A layer's rows as a function writes them, and the attention that reads them. whole: whether
    it reads nothing else."""

    function: Function
    keys: CachedRows
    values: CachedRows
    attend: torch.fx.Node
    whole: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the states."""
        return self.keys.names + self.values.names

    @property
    def how(self) -> dict[str, Any]:
        """How rows are stored in few bits; nothing where they are not."""
        given = arguments(self.attend)
        return {name: given[name] for name in ("bits", "turned") if name in given}

    @property
    def window(self) -> int | None:
        """See `window_of`."""
        return window_of(self.attend)

    @property
    def options(self) -> dict[str, Any]:
        """See `scored`."""
        return scored(self.attend)

    @property
    def what(self) -> str:
        """For messages."""
        return f"{self.function.name} ({self.keys.names[0]})"


def written(fn: Function, program: Program) -> Iterator[Written]:
    """The rows of caches that a function writes and attends to."""
    for attend in fn.calls(*ATTENDS):
        given = arguments(attend)
        read = [
            [given[part] for part in parts if part in given]
            for parts in (("k", "k_steps"), ("v", "v_steps"))
        ]
        own = [tuple(node for node in nodes if _writes_state(node, program)) for nodes in read]
        whole = [len(nodes) for nodes in own] == [len(nodes) for nodes in read]
        if any(own):
            keys, values = map(CachedRows, own)
            yield Written(fn, keys, values, attend, whole)


def _writes_state(node: Any, program: Program) -> bool:
    made = isinstance(node, torch.fx.Node) and node.target is G.cache_write.default
    return made and str(node.args[0].target) in program.states


def unbounded(fn: Function, program: Program) -> list[Written]:
    """Those whose attention looks back over no sliding window."""
    return [write for write in written(fn, program) if write.window is None]


class Read(NamedTuple):
    """What attention over a cache reads of a text: queries f[1,H,T,D], keys f[1,G,T,D], values
    f[1,G,T,E], and its scale and softcap."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    options: dict[str, Any]


def read_of(program: Program, caches: Sequence[Written], window: torch.Tensor) -> Iterator[Read]:
    """What each of the step's caches is read with, when a text i64[T] is fed."""
    asked, read = (
        [arguments(cache.attend) for cache in caches],
        ("q", "k", "k_steps", "v", "v_steps"),
    )
    values = {f"{r}.{n}": g[r] for n, g in enumerate(asked) for r in read if r in g}
    (found,) = watched(program, caches[0].function, values, window[None])
    for n, cache in enumerate(caches):
        keys, rows = (
            G.stored_rows(found[f"{r}.{n}"], found[f"{r}_steps.{n}"], **cache.how)
            if cache.how
            else found[f"{r}.{n}"]
            for r in "kv"
        )
        yield Read(found[f"q.{n}"], keys, rows, cache.options)
