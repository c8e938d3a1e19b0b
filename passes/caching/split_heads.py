"""Give every head of a layer's keys and values a cache of its own.

Before::

    state kv.0.key: f32[B,2,C,D], state kv.0.value: f32[B,2,C,D]
      %kw: f32[B,2,C,D] = graftwork.cache_write(%kv.0.key, %k, %past)
      %y: f32[B,6,T,D] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After::

    state kv.0.0.key: f32[B,1,C,D], state kv.0.1.key: f32[B,1,C,D] ...
      %k0: f32[B,1,T,D] = aten.slice.Tensor(%k, 1, 0, 1)
      %w0: f32[B,1,C,D] = graftwork.cache_write(%kv.0.0.key, %k0, %past)
      %q0: f32[B,3,T,D] = aten.slice.Tensor(%q, 1, 0, 3)
      %y0: f32[B,3,T,D] = graftwork.attend(%q0, %w0, %v0, %m, scale=0.125)
      ...
      %y: f32[B,6,T,D] = aten.cat([%y0, %y1], 1)

Nothing is computed otherwise; but what is done to caches, such as `evict_cache` with a budget for
each, may then differ from head to head. Layers with one head of keys stay as they are, unless each
head of queries gets a cache (`heads`), as in `query_heads`; those that look back over a sliding
window, where all heads hold the same rows, stay so then, too.

Refuses caches that something else than attention reads, and a plan whose cache policy moves rows.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.fx

from ...ir import Function, Program, State, TensorType, arguments, site_of, type_of
from ...ir.plan.contract import Contract
from ..engine.base import Effect, Outcome, register
from .cached_rows import scored, unbounded
from .contents import MOVED, CacheContents
from .exchange import Parts, cached_states, exchange, exchanged
from .query_heads import by_query_head

A, G = torch.ops.aten, torch.ops.graftwork


@register
class SplitHeads(CacheContents):
    """heads: "shared", heads of queries that share keys share a cache; or "own", each has one."""

    heads: Literal["shared", "own"] = "shared"

    contract: ClassVar[Contract] = Contract.EXACT
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.CACHE_LAYOUT})
    reads: ClassVar[frozenset[Effect]] = frozenset({Effect.FUNCTIONS, Effect.LAYER_SET})

    def run(self, program: Program) -> Outcome:
        self.refuse_other(program, f"{MOVED}: put {self.name} before it")
        names, remarks = cached_states(program), tuple[str, ...]()
        if self.heads == "own":
            program, names, remarks = self._repeated(program)
        wanted = {
            name: _split(program.states[name])
            for name in sorted(names)
            if program.states[name].type.dims[1] != 1
        }
        if not wanted:
            return Outcome(program, 0, "no attention reads a cache of several heads")
        functions = {
            name: exchange(self.name, fn, wanted, _written, _attended)
            for name, fn in program.functions.items()
        }
        states = exchanged(program.states, wanted)
        made = program.replace(functions=functions, states=states)
        return Outcome(made, len(wanted), remarks=remarks)

    def _repeated(self, program: Program) -> tuple[Program, set[str], tuple[str, ...]]:
        """The program with rows for every head of queries, the states that hold them, and what the
        user should know of it."""
        functions = {name: fn.copy() for name, fn in program.functions.items()}
        states, step = dict(program.states), functions[program.step.name]
        caches = unbounded(step, program)
        remarks = by_query_head(caches, functions.values(), states)
        names = {name for cache in caches for name in cache.names}
        return program.replace(functions=functions, states=states), names, remarks


def _split(state: State) -> list[State]:
    batch, count, *rest = state.type.dims
    base, type = state.name.removesuffix(f".{state.part}"), state.type
    one = TensorType(type.dtype, (batch, 1, *rest))
    assert isinstance(count, int)
    return [State(f"{base}.{n}.{state.part}", one, state.layer, state.part) for n in range(count)]


def _piece(fn: Function, node: torch.fx.Node, axis: int, start: int, count: int) -> torch.fx.Node:
    return fn.call(A.slice.Tensor, node, axis, start, start + count, site=site_of(node))


def _written(fn: Function, node: torch.fx.Node, caches: Parts) -> Parts:
    given, made = arguments(node), []
    for n, cache in enumerate(caches):
        operands = cache, _piece(fn, given["new"], 1, n, 1), given["past"]
        made.append(fn.call(G.cache_write.default, *operands, site=site_of(node)))
    return tuple(made)


def _attended(fn: Function, node: torch.fx.Node, keys: Parts, values: Parts) -> torch.fx.Node:
    given = arguments(node)
    each = int(str(type_of(given["q"]).dims[1])) // len(keys)
    made = []
    for n, (key, value) in enumerate(zip(keys, values, strict=True)):
        how = scored(node)
        for name, axis in (("bias", 1), ("sinks", 0)):
            whole = given[name]
            how[name] = whole and _piece(fn, whole, axis, n * each, each)
        operands = _piece(fn, given["q"], 1, n * each, each), key, value, given["mask"]
        made.append(fn.call(G.attend.default, *operands, site=site_of(node), **how))
    return fn.call(A.cat.default, made, 1, site=site_of(node))
