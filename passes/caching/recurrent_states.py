"""Give recurrences and convolutions states that live across steps; a part of `insert_kv_cache`.

Before (stage canonical)::

    %c: f32[B,T,D] = graftwork.causal_conv(%x, @weight, layer=0)
    %y: f32[B,H,T,V] = graftwork.linear_attention(%q, %k, %v, %g, %beta, layer=0)

After (stage cached)::

    state recurrent.folded: i64[B]
    state conv.0.history: f32[B,N-1,D]     state conv.0.rows: f32[B,W,D]
    state recurrent.0.state: f32[B,H,K,V]  state recurrent.0.keys: f32[B,G,W,K] ...
    func step(..., past: i64[B], certain: i64[B], recurrent.folded, ...) -> ..., recurrent.folded {
      %c, %h, %r = graftwork.causal_conv_step(%conv.0.history, %conv.0.rows, %recurrent.folded,
                                              %past, %certain, None, %x, @weight)
      %y, ... = graftwork.linear_attention_step(%recurrent.0.state, ..., %q, %k, %v, %g, %beta)
      %f: i64[B] = aten.add.Tensor(%past, %certain)

All layers fold the same rows. Refuses functions that draft, because a state cannot go back to where
a draft began, and a second function of the target with recurrences, which would fold rows twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ...ir import (
    LOG,
    Dim,
    Function,
    PassError,
    Role,
    State,
    Sym,
    TensorType,
    arguments,
    site_of,
    type_of,
)
from ...ir.plan.inputs import INPUTS

A, G = torch.ops.aten, torch.ops.graftwork
RECURRENT = (G.linear_attention.default, G.causal_conv.default)
FOLDED = "recurrent.folded"


def insert_recurrent_states(fn: Function, states: dict[str, State]) -> None:
    """Replace the recurrences of a function in place; its states are added to those there are."""
    nodes = fn.calls(*RECURRENT)
    if not nodes:
        return
    if fn.role is Role.DRAFT:
        raise PassError(
            f"insert_kv_cache: {fn.name} drafts, and its {nodes[0].name} is a recurrence, whose "
            "state cannot go back to where a draft began: take a drafter made of attention"
        )
    if FOLDED in states:
        raise PassError(
            f"insert_kv_cache: {fn.name} has recurrences, and so has another function of the "
            "target: only one of them may carry their states on"
        )
    _Inserter(fn, states).run(nodes)


class _Inserter:
    def __init__(self, fn: Function, states: dict[str, State]) -> None:
        self.fn, self.states = fn, states
        self.written: dict[str, torch.fx.Node] = {}
        self.past = fn.taking("past", INPUTS["past"].type)
        self.certain = fn.add_input("certain", INPUTS["certain"].type)
        self.folded = self.state(FOLDED, TensorType.parse("i64[B]"), 0)

    def run(self, nodes: list[torch.fx.Node]) -> None:
        for node in nodes:
            recurs = node.target is G.linear_attention.default
            with self.fn.graph.inserting_before(node):
                new = self.recurrence(node) if recurs else self.convolution(node)
            self.fn.replace(node, new)
        with self.fn.graph.inserting_before(self.fn.output_node):
            covered = self.fn.call(A.add.Tensor, self.past, self.certain)
        self.fn.set_outputs({**self.fn.outputs, **self.written, FOLDED: covered})

    def state(self, name: str, type: TensorType, layer: int) -> torch.fx.Node:
        """A new state, as an input of the function."""
        self.states[name] = State(name, type, layer, name.rpartition(".")[2])
        return self.fn.add_input(name, type)

    def step(self, node: torch.fx.Node, target: Any, types: dict[str, TensorType]) -> torch.fx.Node:
        """The call for one step in the place of a node: its states first, then its operands."""
        given = arguments(node)
        layer = int(given.pop("layer"))
        held = [self.state(name, type, layer) for name, type in types.items()]
        counts = self.folded, self.past, self.certain, None
        called = self.fn.call(target, *held, *counts, site=site_of(node), **given)
        for index, name in enumerate(types):
            self.written[name] = self.fn.item(called, index + 1)
        return self.fn.item(called, 0)

    def recurrence(self, node: torch.fx.Node) -> torch.fx.Node:
        """See the module docstring."""
        given = arguments(node)
        batch, groups, _, size = type_of(given["k"]).dims
        heads, decays = type_of(given["g"]).dims[1], type_of(given["g"]).dims[3]
        values, prefix, rows = type_of(given["v"]).dims[3], f"recurrent.{given['layer']}", Sym(LOG)
        dims: dict[str, tuple[Dim, ...]] = {
            "state": (batch, heads, size, values),
            "keys": (batch, groups, rows, size),
            "values": (batch, heads, rows, values),
            "decays": (batch, heads, rows, decays),
        }
        types = {
            f"{prefix}.{name}": TensorType(torch.float32, sizes) for name, sizes in dims.items()
        }
        return self.step(node, G.linear_attention_step.default, types)

    def convolution(self, node: torch.fx.Node) -> torch.fx.Node:
        """See the module docstring."""
        given = arguments(node)
        kind, span = type_of(given["x"]), type_of(given["weight"]).dims[1]
        batch, _, channels = kind.dims
        assert isinstance(span, int)
        prefix = f"conv.{given['layer']}"
        types = {
            f"{prefix}.history": TensorType(kind.dtype, (batch, span - 1, channels)),
            f"{prefix}.rows": TensorType(kind.dtype, (batch, Sym(LOG), channels)),
        }
        return self.step(node, G.causal_conv_step.default, types)
