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
each, may then differ from head to head. Layers with one head of keys stay as they are.

Refuses caches that something else than attention reads, and a plan whose cache policy moves rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx

from ...ir import Function, PassError, Program, State, TensorType, arguments, site_of, type_of
from ...ir.plan import KeepAll
from ...ir.plan.contract import Contract
from ..engine.base import Effect, Outcome, Pass, register
from .quantize_cache import cached_states, erase

A, G = torch.ops.aten, torch.ops.graftwork

Heads = tuple[torch.fx.Node, ...]


@register
class SplitHeads(Pass):
    """No options."""

    name: ClassVar[str] = "split_heads"
    contract: ClassVar[Contract] = Contract.EXACT
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.CACHE_LAYOUT})
    reads: ClassVar[frozenset[Effect]] = frozenset({Effect.FUNCTIONS, Effect.LAYER_SET})

    def run(self, program: Program) -> Outcome:
        """Split what attention of the target reads. See the module docstring."""
        if not isinstance(program.plan.cache, KeepAll):
            raise PassError(
                f"{self.name}: the plan has cache={program.plan.cache.brief} already, whose "
                f"functions move rows as they are: put {self.name} before it"
            )
        wanted = {
            name: _split(program.states[name])
            for name in sorted(cached_states(program))
            if program.states[name].type.dims[1] != 1
        }
        if not wanted:
            return Outcome(program, 0, "no attention reads a cache of several heads")
        states: dict[str, State] = {}
        for name, state in program.states.items():
            states.update({each.name: each for each in wanted.get(name, [state])})
        functions = {name: self._function(fn, wanted) for name, fn in program.functions.items()}
        return Outcome(program.replace(functions=functions, states=states), len(wanted))

    def _function(self, function: Function, wanted: dict[str, list[State]]) -> Function:
        own = [str(node.target) for node in function.inputs if str(node.target) in wanted]
        if not own:
            return function
        fn = function.copy()
        heads: dict[torch.fx.Node, Heads] = {}
        for name in own:
            made = tuple(fn.add_input(state.name, state.type) for state in wanted[name])
            heads[fn.input(name)] = made
        for node in fn.calls(G.cache_write.default, G.attend.default):
            with fn.graph.inserting_before(node):
                if node.target is G.cache_write.default and node.args[0] in heads:
                    heads[node] = _written(fn, node, heads)
                elif node.target is G.attend.default and node.args[1] in heads:
                    node.replace_all_uses_with(_attended(fn, node, heads))
        outputs: dict[str, torch.fx.Node] = {}
        for name, value in fn.outputs.items():
            names = [state.name for state in wanted[name]] if name in own else [name]
            outputs.update(zip(names, heads[value] if name in own else (value,), strict=True))
        fn.set_outputs(outputs)
        for node in reversed(list(fn)):
            if node in heads or (node.target is G.attend.default and not node.users):
                erase(self.name, fn, node)
        return fn


def _split(state: State) -> list[State]:
    batch, count, *rest = state.type.dims
    base, type = state.name.removesuffix(f".{state.part}"), state.type
    one = TensorType(type.dtype, (batch, 1, *rest))
    assert isinstance(count, int)
    return [State(f"{base}.{n}.{state.part}", one, state.layer, state.part) for n in range(count)]


def _piece(fn: Function, node: torch.fx.Node, axis: int, start: int, count: int) -> torch.fx.Node:
    return fn.call(A.slice.Tensor, node, axis, start, start + count, site=site_of(node))


def _written(fn: Function, node: torch.fx.Node, heads: dict[torch.fx.Node, Heads]) -> Heads:
    given = arguments(node)
    return tuple(
        fn.call(
            G.cache_write.default,
            *(cache, _piece(fn, given["new"], 1, n, 1), given["past"]),
            site=site_of(node),
        )
        for n, cache in enumerate(heads[given["cache"]])
    )


def _attended(
    fn: Function, node: torch.fx.Node, heads: dict[torch.fx.Node, Heads]
) -> torch.fx.Node:
    given = arguments(node)
    options = {name: given[name] for name in ("scale", "softcap") if given[name] is not None}
    keys, values = heads[given["k"]], heads.get(given["v"])
    if values is None:
        raise PassError(f"split_heads: {fn.name} attends to keys of a cache and other values")
    each = int(str(type_of(given["q"]).dims[1])) // len(keys)
    made = []
    for n, (key, value) in enumerate(zip(keys, values, strict=True)):
        rest = [given["mask"]]
        for name, axis in (("bias", 1), ("sinks", 0)):
            whole = given[name]
            rest.append(whole and _piece(fn, whole, axis, n * each, each))
        while rest[-1] is None:
            rest.pop()
        query = _piece(fn, given["q"], 1, n * each, each)
        made.append(
            fn.call(G.attend.default, query, key, value, *rest, site=site_of(node), **options)
        )
    return fn.call(A.cat.default, made, 1, site=site_of(node))
