"""Run the tokens of a ragged batch in one row, without those that fill up shorter sequences.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T], past: i64[B], ...) -> logits f32[B,T,V] {
      %x: f32[B,T,H] = aten.embedding(@embed, %tokens)
      %q: f32[B,T,H] = aten.linear(%x, @q)
      ... caches and attention on %q ... -> %a: f32[B,T,H]
      %o: f32[B,T,H] = aten.linear(%a, @o)

After::

    func step(tokens, positions, past, ..., packed: i64[1,N], places: i64[B,T]) -> ... {
      %t: i64[B,T,1] = aten.reshape(%tokens, [B, T, 1])
      %u: i64[1,N,1] = graftwork.take_tokens(%t, %packed)
      ...
      %x: f32[1,N,H] = aten.embedding(@embed, %v)
      %q: f32[1,N,H] = aten.linear(%x, @q)
      %r: f32[B,T,H] = graftwork.take_tokens(%q, %places)
      ... caches and attention on %r ... -> %a: f32[B,T,H]
      %b: f32[1,N,H] = graftwork.take_tokens(%a, %packed)
      %o: f32[1,N,H] = aten.linear(%b, @o)

N is the number of tokens that the sequences feed, each as many as it has. What is known to work
token by token runs on them: look-ups, norms, products, experts. All else, attention, recurrences,
masks and what only prepares them, sees sequences, as before; filler there is a copy of some token.
With ``select`` the head runs on the chosen columns that are wanted, by ``picked`` and ``shown`` in
the same way. Outputs have the shapes that they had. Applies to every function of the target with
``past``. Refuses one that packs already, and one without products of its tokens.

Source: Ni et al., "EMS-SD: Efficient Multi-sample Speculative Decoding" (2024). Its other half,
caches without filler, holds in every program: each sequence has its own ``past``.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ...ir import Function, Program, TensorType, arguments, site_of, type_of
from ...ir.plan.inputs import INPUTS, PACKED
from ...ir.rewrite.cleanup import sweep
from ...ir.types import Dim
from ..engine.base import Effect, Outcome, Pass, register
from ..engine.functions import TARGET, edit_each
from .by_token import B, M, N, Rows, T, in_one_row, packed_type, rows_of, together, works

A, G = torch.ops.aten, torch.ops.graftwork


@register
class PackTokens(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    provides: ClassVar[frozenset[str]] = frozenset({"packed"})
    reads: ClassVar[frozenset[Effect]] = frozenset(Effect)

    def run(self, program: Program) -> Outcome:
        return edit_each(program, _pack, TARGET)


def _pack(fn: Function) -> int | str:
    if not fn.has_input("past"):
        return f"{fn.name} has no states"
    if fn.has_input(PACKED):
        return f"{fn.name} packs its tokens already"
    sizes = {dim for node in fn.inputs for dim in type_of(node).dims}
    if sizes & {N, M}:
        return f"{fn.name} has inputs of sizes that are called N or M"
    chosen = together(fn)
    work = [node for node in chosen if works(node)]
    if not work:
        return f"{fn.name} has no product of its tokens"
    packer = _Packer(fn)
    for node in fn.calls():
        packer.take(node, together=node in chosen)
    packer.finish()
    sweep(fn)
    return len(work)


class _Packer:
    """Rewrites a function call by call.

    rows: by value, the same with its tokens in one row. made: values that are made so. sequences:
    by such a value, the same by sequence. wanted: by ``select``, places of the chosen tokens that
    are wanted.
    """

    def __init__(self, fn: Function) -> None:
        self.fn = fn
        self.rows: dict[torch.fx.Node, torch.fx.Node] = {}
        self.made: set[torch.fx.Node] = set()
        self.sequences: dict[torch.fx.Node, torch.fx.Node] = {}
        self.wanted: dict[torch.fx.Node, torch.fx.Node] = {}
        names = ("packed", "places", *(("picked", "shown") * fn.has_input("select")))
        self.inputs = {name: fn.add_input(name, INPUTS[name].type) for name in names}

    def take(self, node: torch.fx.Node, *, together: bool) -> None:
        """One call of the function, in its order."""
        with self.fn.graph.inserting_before(node):
            if together:
                self.rows[node] = self._again(node)
                self.made.add(node)
                return
            for arg in node.all_input_nodes:
                node.replace_input_with(arg, self.by_sequence(arg))

    def finish(self) -> None:
        """Outputs are by sequence."""
        outputs = self.fn.outputs
        (end,) = self.fn.graph.find_nodes(op="output")
        with self.fn.graph.inserting_before(end):
            found = {name: self.by_sequence(node) for name, node in outputs.items()}
        self.fn.set_outputs(found)

    def by_sequence(self, node: torch.fx.Node) -> torch.fx.Node:
        """A value by sequences, at the insertion point when it is first asked for."""
        if node not in self.made:
            return node
        if node not in self.sequences:
            rows = rows_of(type_of(node))
            assert rows is not None
            index = self.inputs["places" if rows.columns == T else "shown"]
            row = self.rows[node]
            self.sequences[node] = self._taken(row, rows, (1, rows.total), index, type_of(node))
        return self.sequences[node]

    def in_one_row(self, node: torch.fx.Node) -> torch.fx.Node:
        """A value with its tokens in one row; one that holds none is as it is."""
        rows = rows_of(node.meta["type"])
        if rows is None:
            return node
        if node not in self.rows:
            index = self.inputs["packed" if rows.columns == T else "picked"]
            type = packed_type(type_of(node))
            self.rows[node] = self._taken(node, rows, (B, rows.columns), index, type)
        return self.rows[node]

    def _again(self, node: torch.fx.Node) -> torch.fx.Node:
        """A call on packed tokens."""
        fn: Any = self.fn
        if node.target is G.pick_rows.default:
            return self._picked(node)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            operands = {source: self.rows[source]}
        else:
            operands = {arg: self.in_one_row(arg) for arg in node.all_input_nodes}

        def value(arg: Any) -> Any:
            return operands[arg] if isinstance(arg, torch.fx.Node) else in_one_row(arg)

        args, kwargs = map_aggregate(node.args, value), map_aggregate(node.kwargs, value)
        granted = bool(node.meta.get("granted"))
        made: torch.fx.Node = fn.call(
            node.target, *args, site=site_of(node), granted=granted, **kwargs
        )
        return made

    def _picked(self, node: torch.fx.Node) -> torch.fx.Node:
        """The chosen tokens that are wanted, out of the packed ones."""
        fn, given = self.fn, arguments(node)
        select = given["select"]
        if select not in self.wanted:
            among = fn.call(A.gather.default, self.inputs["places"], 1, select)
            cells = fn.call(A.unsqueeze.default, among, 2)
            some = fn.call(G.take_tokens.default, cells, self.inputs["picked"])
            self.wanted[select] = fn.call(A.squeeze.dim, some, 2)
        row = self.in_one_row(given["x"])
        return fn.call(G.take_tokens.default, row, self.wanted[select], site=site_of(node))

    def _taken(
        self,
        node: torch.fx.Node,
        rows: Rows,
        sizes: tuple[Dim, Dim],
        index: torch.fx.Node,
        result: TensorType,
    ) -> torch.fx.Node:
        """A value's tokens by an index, which makes it one of the result's type. sizes: those that
        it has of sequences and columns."""
        fn, site, rank = self.fn, site_of(node), len(result.dims)
        axes = (rows.batch,) if rows.flat else (rows.batch, rows.column)
        order = [*axes, *(axis for axis in range(rank) if axis not in axes)]
        moved = order != list(range(rank))
        if moved:
            node = fn.call(A.permute.default, node, order, site=site)
        width: Dim = 1
        for axis in order[len(axes) :]:
            width = width * result.dims[axis]
        if type_of(node).dims != (*sizes, width):
            node = fn.call(A.reshape.default, node, [*sizes, width], site=site)
        node = fn.call(G.take_tokens.default, node, index, site=site)
        dims = [result.dims[axis] for axis in order]
        if type_of(node).dims != tuple(dims):
            node = fn.call(A.reshape.default, node, dims, site=site)
        if moved:
            back = [order.index(axis) for axis in range(rank)]
            node = fn.call(A.permute.default, node, back, site=site)
        return node
