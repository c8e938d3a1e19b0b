"""Give every attention a key-value cache that lives across steps.

Before (stage canonical)::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V] {
      %y: f32[B,H,T,D] = graftwork.attention(%q, %k, %v, layer=0, scale=0.125)

After (stage cached)::

    state kv.0.key: f32[B,G,C,D] ...
    func step(tokens, positions, past: i64[B], kv.0.key, ...) -> logits, kv.0.key, ... {
      %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C)
      %kw: f32[B,G,C,D] = graftwork.cache_write(%kv.0.key, %k, %past)
      %vw: f32[B,G,C,D] = graftwork.cache_write(%kv.0.value, %v, %past)
      %y: f32[B,H,T,D] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

Recurrences and convolutions get their states likewise, see `recurrent_states`, and so does what is
made of a source, see `source_states`. Layers that see equally far back share one mask. The target's
functions share the caches of their layers, because a layer's rows are the same whoever writes them.
A function that drafts gets its own: those of ``eagle`` are called ``eagle.kv.0.key`` and so on. It
may read the target's, see `target_states`. Refuses a program whose step has nothing to cache or a
cache already, a function in which two attentions claim one layer, and functions of the target that
differ in what a layer's rows are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import (
    Function,
    PassError,
    Program,
    Role,
    State,
    Sym,
    TensorType,
    arguments,
    site_of,
    type_of,
)
from ...ir.ops.attention import SPANS
from ...ir.plan.inputs import INPUTS
from ...ir.rewrite.cleanup import sweep
from ..engine.base import Effect, Outcome, Pass, register
from .cached_rows import scored
from .recurrent_states import RECURRENT, insert_recurrent_states
from .source_states import insert_source_states
from .target_states import bind_target_states

G = torch.ops.graftwork
MIXERS = (G.attention.default, *RECURRENT, G.source_attention.default)


@register
class InsertKvCache(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"cached"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.CACHE_LAYOUT})
    reads: ClassVar[frozenset[Effect]] = frozenset(
        {Effect.FUNCTIONS, Effect.LAYER_SET, Effect.PLACEMENT}
    )

    def run(self, program: Program) -> Outcome:
        if not program.step.calls(*MIXERS):
            left = " without a cache" if program.states else ""
            return Outcome(program, 0, f"{program.step.name} has no graftwork.attention{left}")
        functions, states = dict(program.functions), dict(program.states)
        count = 0
        encoder = program.plan.source.encoder
        # First what makes the states that others read.
        for name in sorted(functions, key=lambda name: name != encoder):
            function = functions[name]
            if found := len(function.calls(*MIXERS)):
                functions[name] = _cached(function, states, encodes=name == encoder)
                count += found
        cached = program.replace(functions=functions, states=states, stage="cached")
        return Outcome(bind_target_states(cached), count)


def _cached(function: Function, states: dict[str, State], *, encodes: bool) -> Function:
    """A function with cached attention; its states are added to those there are. encodes: it reads
    the source."""
    fn = function.copy()
    nodes = fn.calls(G.attention.default)
    layers = [int(node.kwargs["layer"]) for node in nodes]  # type: ignore[arg-type]
    if len(set(layers)) != len(layers):
        raise PassError(
            f"insert_kv_cache: two attentions of {fn.name} claim one layer: {sorted(layers)}"
        )
    sweep(fn)  # an attention that nobody reads any more gets no cache
    if attentions := fn.calls(G.attention.default):
        inserter = _Inserter(fn, states)
        for node in attentions:
            inserter.replace(node)
        fn.set_outputs({**fn.outputs, **inserter.written})
    insert_recurrent_states(fn, states)
    insert_source_states(fn, states, encodes=encodes)
    return fn


class _Inserter:
    def __init__(self, fn: Function, states: dict[str, State]) -> None:
        self.fn, self.states = fn, states
        self.prefix = f"{fn.name}.kv" if fn.role is Role.DRAFT else "kv"
        self.first = fn.calls()[0]
        self.past = fn.add_input("past", INPUTS["past"].type)
        self.written: dict[str, torch.fx.Node] = {}
        self.masks: dict[tuple[tuple[str, Any], ...], torch.fx.Node] = {}
        self.biases: dict[object, torch.fx.Node] = {}

    def mask(self, span: dict[str, Any]) -> torch.fx.Node:
        """The mask of all attentions that see so far back, at the top of the function."""
        key = tuple(span.items())
        if key not in self.masks:
            with self.fn.graph.inserting_before(self.first):
                self.masks[key] = self.fn.call(
                    G.step_mask.default,
                    self.past,
                    self.fn.input("positions"),
                    None,
                    Sym("C"),
                    **span,
                )
        return self.masks[key]

    def write(self, layer: int, part: str, rows: torch.fx.Node, site: object) -> torch.fx.Node:
        """The state for these rows, and the write of a step's rows into it."""
        row_type = type_of(rows)
        dims = (row_type.dims[0], row_type.dims[1], Sym("C"), row_type.dims[3])
        state = State(
            f"{self.prefix}.{layer}.{part}", TensorType(row_type.dtype, dims), layer, part
        )
        known = self.states.setdefault(state.name, state)
        if known != state:
            raise PassError(
                f"insert_kv_cache: {self.fn.name} keeps {state.type} of layer {layer}'s {part}, "
                f"and another function of the target keeps {known.type}: give the layer another "
                f"number, or make the function one that drafts"
            )
        cache = self.fn.add_input(state.name, state.type)
        node = self.fn.call(G.cache_write.default, cache, rows, self.past, site=site_of(rows))
        self.written[state.name] = node
        return node

    def bias(
        self, slopes: torch.fx.Node | None, distances: torch.fx.Node | None, site: Any
    ) -> torch.fx.Node | None:
        """What is added to scores; one for all attentions that add the same."""
        if slopes is not None and distances is not None:
            raise PassError(f"insert_kv_cache: {self.fn.name} has attention with two biases")
        given = slopes if distances is None else distances
        if given is None:
            return None
        target = G.alibi.default if distances is None else G.distance_bias.default
        key = target, given.target
        if key not in self.biases:
            positions = self.fn.input("positions")
            args = given, self.past, positions, Sym("C")
            self.biases[key] = self.fn.call(target, *args, site=site)
        return self.biases[key]

    def replace(self, node: torch.fx.Node) -> None:
        """Turn one attention into two cache writes and a read."""
        given = arguments(node)
        q, k, v, sinks = (given[name] for name in ("q", "k", "v", "sinks"))
        layer, span = given["layer"], {n: given[n] for n in SPANS if given[n] is not None}
        mask, site = self.mask(span), site_of(node)
        with self.fn.graph.inserting_before(node):
            keys = self.write(layer, "key", k, site)
            values = self.write(layer, "value", v, site)
            bias = self.bias(given["slopes"], given["distances"], site)
            how = {"bias": bias, "sinks": sinks, **scored(node)}
            attended = self.fn.call(G.attend.default, q, keys, values, mask, site=site, **how)
        self.fn.replace(node, attended)
