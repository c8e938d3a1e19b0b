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

from typing import Any

import torch
import torch.fx

from ...ir import SOURCE, Dim, Function, PassError, State, Sym, TensorType, arguments, site_of
from ...ir import type_of as ir_type

A, G = torch.ops.aten, torch.ops.graftwork
MASK = "cross.mask"


def insert_source_states(fn: Function, states: dict[str, State], *, encodes: bool) -> None:
    """Edit a function in place. encodes: it is the one that makes the states, which are added to
    those there are."""
    if not encodes and not fn.calls(G.source_attention.default):
        return
    inserter = _Encoder(fn, states) if encodes else _Reader(fn, states)
    for node in fn.calls(G.source_attention.default):
        with fn.graph.inserting_before(node):
            attended = inserter.attended(node)
        node.replace_all_uses_with(attended)
        fn.graph.erase_node(node)
    inserter.finish()


class _Inserter:
    def __init__(self, fn: Function, states: dict[str, State]) -> None:
        self.fn, self.states = fn, states
        self.masks: dict[tuple[Dim, Dim], torch.fx.Node] = {}

    def attended(self, node: torch.fx.Node) -> torch.fx.Node:
        """What stands for an attention to a source."""
        given = arguments(node)
        width, rows = ir_type(given["q"]).dims[2], ir_type(given["k"]).dims[2]
        args = [given["q"], given["k"], given["v"], self.mask(width, rows)]
        if given["distances"] is not None:
            args.append(self.bias(given["distances"], rows))
        how = ("scale", "softcap")
        options: dict[str, Any] = {name: n for name, n in node.kwargs.items() if name in how}
        return self.fn.call(G.attend.default, *args, site=site_of(node), **options)

    def mask(self, width: Dim, rows: Dim) -> torch.fx.Node:
        """bool[B,1,T,N], once for all layers."""
        if (width, rows) not in self.masks:
            seen = self.rows(rows)
            flat = self.fn.call(A.reshape.default, seen, [Sym("B"), 1, 1, rows])
            sizes = [Sym("B"), 1, width, rows]
            self.masks[width, rows] = self.fn.call(A.expand.default, flat, sizes)
        return self.masks[width, rows]

    def rows(self, count: Dim) -> torch.fx.Node:
        """Which rows of the source there are, bool[B,N]."""
        raise NotImplementedError

    def bias(self, table: torch.fx.Node, rows: Dim) -> torch.fx.Node:
        """What a table of distances adds to scores."""
        raise NotImplementedError

    def finish(self) -> None:
        """What is left once no attention to a source is."""


class _Encoder(_Inserter):
    """Makes the states."""

    def __init__(self, fn: Function, states: dict[str, State]) -> None:
        super().__init__(fn, states)
        self.lengths = fn.input("lengths")
        with fn.graph.inserting_before(fn.calls()[0]):
            self.zero = fn.call(A.full_like.default, self.lengths, 0)
        self.biases: dict[torch.fx.Node, torch.fx.Node] = {}

    def rows(self, count: Dim) -> torch.fx.Node:
        """See `_Inserter.rows`."""
        return self.fn.call(G.source_rows.default, self.lengths, count)

    def bias(self, table: torch.fx.Node, rows: Dim) -> torch.fx.Node:
        """See `_Inserter.bias`."""
        if table not in self.biases:
            if not self.fn.has_input("positions"):
                raise PassError(f"insert_kv_cache: {self.fn.name} weighs rows without positions")
            positions = self.fn.input("positions")
            args = table, self.zero, positions, rows
            self.biases[table] = self.fn.call(G.distance_bias.default, *args)
        return self.biases[table]

    def finish(self) -> None:
        """Write what is returned into states."""
        written: dict[str, torch.fx.Node] = {}
        with self.fn.graph.inserting_before(self.fn.output_node):
            for name, rows in self.fn.outputs.items():
                kind = ir_type(rows)
                dims = (*kind.dims[:2], Sym(SOURCE), kind.dims[3])
                cache = self.state(name, TensorType(kind.dtype, dims))
                site = site_of(rows)
                write = self.fn.call(G.cache_write.default, cache, rows, self.zero, site=site)
                written[name] = write
            self.state(MASK, TensorType(torch.bool, (Sym("B"), Sym(SOURCE))))
            written[MASK] = self.rows(Sym(SOURCE))
        self.fn.set_outputs(written)

    def state(self, name: str, type: TensorType) -> torch.fx.Node:
        """A new state, as an input of the function."""
        _, _, rest = name.partition(".")
        layer, _, part = rest.rpartition(".")
        self.states[name] = State(name, type, int(layer or 0), part)
        return self.fn.add_input(name, type)


class _Reader(_Inserter):
    """Reads the states."""

    def __init__(self, fn: Function, states: dict[str, State]) -> None:
        super().__init__(fn, states)
        for node in fn.inputs:
            if str(node.target) in states:
                node.meta["type"] = states[str(node.target)].type
        self.held = fn.add_input(MASK, states[MASK].type)

    def mask(self, width: Dim, rows: Dim) -> torch.fx.Node:
        """See `_Inserter.mask`: above the first layer, where all others find it."""
        with self.fn.graph.inserting_before(self.fn.calls()[0]):
            return super().mask(width, rows)

    def rows(self, count: Dim) -> torch.fx.Node:
        """See `_Inserter.rows`."""
        return self.held

    def bias(self, table: torch.fx.Node, rows: Dim) -> Any:
        """See `_Inserter.bias`."""
        raise PassError(
            f"insert_kv_cache: {self.fn.name} weighs rows of a source by their distance; expected "
            "an attention to it without a bias"
        )

    def finish(self) -> None:
        """Nobody asks for lengths any more."""
        self.fn.graph.erase_node(self.fn.input("lengths"))
