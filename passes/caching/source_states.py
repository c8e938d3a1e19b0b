"""Give what is made of a source states that live across steps; a part of `insert_kv_cache`.

Before (stage canonical)::

    func encode(tokens: i64[B,T], positions, lengths: i64[B]) -> cross.0.key f32[B,H,T,D], ... {
      %y = graftwork.source_attention(%q, %k, %v, %lengths, @distance.0, layer=0, scale=1.0)
    func step(tokens, positions, lengths, cross.0.key: f32[B,H,N,D], cross.0.value, ...) {
      %z = graftwork.source_attention(%p, %cross.0.key, %cross.0.value, %lengths, layer=0, ...)

After (stage cached)::

    state cross.0.key: f32[B,H,E,D] ...      state cross.mask: bool[B,E]
    func encode(tokens, positions, lengths, cross.0.key, ..., cross.mask) -> cross.0.key, ... {
      %m: bool[B,1,T,T] = ...                                 of graftwork.source_rows(%lengths, T)
      %b: f32[B,H,T,T] = graftwork.distance_bias(@distance.0, %zero, %positions, T)
      %y = graftwork.attend(%q, %k, %v, %m, %b, scale=1.0)
      %kw: f32[B,H,E,D] = graftwork.cache_write(%cross.0.key, %key, %zero)
      %rows: bool[B,E] = graftwork.source_rows(%lengths, E)
    func step(tokens, positions, cross.0.key: f32[B,H,E,D], ..., cross.mask, ...) {
      %z = graftwork.attend(%p, %cross.0.key, %cross.0.value, %m, scale=0.125)

Steps do not write these states, so nothing that moves or drops rows of a text touches them. Refuses
a step that weighs rows of a source by distance.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.fx

from ...ir import (
    SOURCE,
    Dim,
    Function,
    PassError,
    State,
    Sym,
    TensorType,
    arguments,
    site_of,
    type_of,
)
from .cached_rows import scored

A, G = torch.ops.aten, torch.ops.graftwork
MASK = "cross.mask"


def insert_source_states(fn: Function, states: dict[str, State], *, encodes: bool) -> None:
    """Edit a function in place. encodes: it is the one that makes the states, which are added to
    those there are."""
    nodes = fn.calls(G.source_attention.default)
    if not encodes and not nodes:
        return
    inserter = _Inserter(fn, states, encodes)
    for node in nodes:
        with fn.graph.inserting_before(node):
            attended = inserter.attended(node)
        fn.replace(node, attended)
    if encodes:
        inserter.write()
    else:
        fn.graph.erase_node(inserter.lengths)


class _Inserter:
    """Edits one function. encodes: it makes the states; else it reads them."""

    def __init__(self, fn: Function, states: dict[str, State], encodes: bool) -> None:
        self.fn, self.states, self.encodes = fn, states, encodes
        self.lengths, self.first = fn.input("lengths"), fn.calls()[0]
        self.masks: dict[tuple[Dim, Dim], torch.fx.Node] = {}
        self.biases: dict[torch.fx.Node, torch.fx.Node] = {}
        if encodes:
            with fn.graph.inserting_before(self.first):
                self.zero = fn.call(A.full_like.default, self.lengths, 0)
            return
        for node in fn.inputs:
            if str(node.target) in states:
                node.meta["type"] = states[str(node.target)].type
        self.held = fn.add_input(MASK, states[MASK].type)

    def attended(self, node: torch.fx.Node) -> torch.fx.Node:
        """What stands for an attention to a source."""
        given = arguments(node)
        width, rows = type_of(given["q"]).dims[2], type_of(given["k"]).dims[2]
        args = given["q"], given["k"], given["v"], self.mask(width, rows)
        table, how = given["distances"], scored(node)
        how["bias"] = None if table is None else self.bias(table, rows)
        return self.fn.call(G.attend.default, *args, site=site_of(node), **how)

    def mask(self, width: Dim, rows: Dim) -> torch.fx.Node:
        """bool[B,1,T,N], once for all layers: which rows of the source there are."""
        if (width, rows) not in self.masks:
            fn, sizes = self.fn, [Sym("B"), 1, width, rows]
            seen = self.rows(rows) if self.encodes else self.held
            above = nullcontext() if self.encodes else fn.graph.inserting_before(self.first)
            with above:
                flat = fn.call(A.reshape.default, seen, [Sym("B"), 1, 1, rows])
                self.masks[width, rows] = fn.call(A.expand.default, flat, sizes)
        return self.masks[width, rows]

    def rows(self, count: Dim) -> torch.fx.Node:
        """bool[B,N]: which rows of the source there are, as its lengths say."""
        return self.fn.call(G.source_rows.default, self.lengths, count)

    def bias(self, table: torch.fx.Node, rows: Dim) -> torch.fx.Node:
        """What a table of distances adds to scores."""
        if not self.encodes:
            raise PassError(
                f"insert_kv_cache: {self.fn.name} weighs rows of a source by their distance; "
                "expected an attention to it without a bias"
            )
        if table not in self.biases:
            if not self.fn.has_input("positions"):
                raise PassError(f"insert_kv_cache: {self.fn.name} weighs rows without positions")
            args = table, self.zero, self.fn.input("positions"), rows
            self.biases[table] = self.fn.call(G.distance_bias.default, *args)
        return self.biases[table]

    def write(self) -> None:
        """Write what the function returns into states."""
        written: dict[str, torch.fx.Node] = {}
        with self.fn.graph.inserting_before(self.fn.output_node):
            for name, rows in self.fn.outputs.items():
                kind, site = type_of(rows), site_of(rows)
                dims = (*kind.dims[:2], Sym(SOURCE), kind.dims[3])
                args = self.state(name, TensorType(kind.dtype, dims)), rows, self.zero
                written[name] = self.fn.call(G.cache_write.default, *args, site=site)
            self.state(MASK, TensorType(torch.bool, (Sym("B"), Sym(SOURCE))))
            written[MASK] = self.rows(Sym(SOURCE))
        self.fn.set_outputs(written)

    def state(self, name: str, type: TensorType) -> torch.fx.Node:
        """A new state, as an input of the function."""
        layer, _, part = name.partition(".")[2].rpartition(".")
        self.states[name] = State(name, type, int(layer or 0), part)
        return self.fn.add_input(name, type)
