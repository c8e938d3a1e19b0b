"""Attention of a function that drafts to the keys and values of one of the target's layers.

What it builds, as IR (layer 5 of the target)::

    draft func f(..., seen: i64[B,T], target.5.key: f32[B,G,N,D], target.5.value: ...) -> ... {
      %q: f32[B,H,T,D] = graftwork.rotary(linear(%x, @name.q_proj.weight), %cos, %sin)
      %y: f32[B,H,T,D] = graftwork.target_attention(%q, %target.5.key, %target.5.value, %seen,
          scale=0.125)
      %z: f32[B,T,N] = aten.linear(%y, @name.o_proj.weight)

Queries have as many heads as the layer's own, and are rotated as its keys are; a layer that looks
back over a window is looked at as far. `insert_kv_cache` puts the layer's states in the place of
the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import PassError, Sym, TensorType, arguments, type_of
from ...ir.plan.inputs import INPUTS, SEEN, TARGET
from .decoder_layer import Angles
from .grafts import Graft

A, G = torch.ops.aten, torch.ops.graftwork
B, T = Sym("B"), Sym("T")
ROWS = Sym("N")


@dataclass(frozen=True)
class TargetLayer:
    """A layer of the target, whose attention is this node of the step. number: the layer's."""

    number: int
    attention: torch.fx.Node

    @classmethod
    def of(cls, graft: Graft, number: int | None = None) -> TargetLayer:
        """The layer of this number; None: the last one that attends. Errors: `PassError` that
        lists the layers that attend."""
        layers = {layer.number: layer for layer in cls.every(graft)}
        number = max(layers) if number is None else number
        if number not in layers:
            raise PassError(
                f"{graft.owner}: no attention in layer {number} of the target; there is in "
                f"{', '.join(map(str, layers))}"
            )
        return layers[number]

    @classmethod
    def every(cls, graft: Graft) -> list[TargetLayer]:
        """All layers that attend, in order. Errors: `PassError` if there is none."""
        nodes = graft.step.calls(G.attention.default)
        if not nodes:
            raise PassError(
                f"{graft.owner}: no layer of step attends to the text (graftwork.attention): there "
                f"are no keys and values to read"
            )
        found = [cls(int(node.kwargs["layer"]), node) for node in nodes]  # type: ignore[arg-type]
        return sorted(found, key=lambda layer: layer.number)

    @property
    def heads(self) -> int:
        """Heads of the layer's queries."""
        return int(str(type_of(arguments(self.attention)["q"]).dims[1]))

    def rows(self, graft: Graft, part: str) -> torch.fx.Node:
        """The function's input of the layer's "key" or "value", f[B,G,N,D]."""
        batch, groups, _, width = type_of(arguments(self.attention)[part[0]]).dims
        type = TensorType(graft.dtype, (batch, groups, ROWS, width))
        return graft.fn.taking(f"{TARGET}.{self.number}.{part}", type)

    def angles(self, graft: Graft, positions: torch.fx.Node) -> Angles | None:
        """What the layer's keys are rotated by, for positions i64[B,T]; None: by nothing that
        depends on positions alone."""
        node: Any = arguments(self.attention)["k"]
        while node.target is not G.rotary.default and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        if node.target is not G.rotary.default:
            return None
        given: dict[Any, torch.fx.Node] = {graft.step.input("positions"): positions}
        try:
            cos, sin = (graft.copy(given, table) for table in node.args[1:3])
        except PassError:  # they take more than positions
            return None
        return Angles(cos, sin, bool(node.kwargs.get("interleaved", False)))

    def attend(
        self, graft: Graft, x: torch.fx.Node, positions: torch.fx.Node, name: str
    ) -> torch.fx.Node:
        """What x [B,T,M] finds in the layer's rows, [B,T,M]. positions i64[B,T]; name: prefix of
        the weights. See the module docstring."""
        rows = self.rows(graft, "key"), self.rows(graft, "value")
        window = arguments(self.attention)["window"]
        return asked(graft, x, rows, self.heads, self.angles(graft, positions), name, window)


def asked(
    graft: Graft,
    x: torch.fx.Node,
    rows: tuple[torch.fx.Node, torch.fx.Node],
    heads: int,
    angles: Angles | None,
    name: str,
    window: int | None = None,
) -> torch.fx.Node:
    """What x [B,T,M] finds in rows, [B,T,M]: keys f[B,G,N,D] and values f[B,G,N,E], as many as
    ``seen`` says. angles: of the queries. name: prefix of the weights."""
    key, value = rows
    seen = graft.fn.taking(SEEN, INPUTS[SEEN].type)
    dim, wide = (int(str(type_of(part).dims[3])) for part in rows)
    query = graft.linear(x, f"{name}.q_proj", heads * dim, bias=False)
    query = graft.call(A.reshape.default, query, [B, T, heads, dim])
    query = graft.call(A.permute.default, query, [0, 2, 1, 3])
    query = query if angles is None else angles.rotate(graft, query)
    how = {"scale": dim**-0.5, "window": window}
    y = graft.call(G.target_attention.default, query, key, value, seen, **how)
    y = graft.call(A.permute.default, y, [0, 2, 1, 3])
    y = graft.call(A.reshape.default, y, [B, T, heads * wide])
    return graft.linear(y, f"{name}.o_proj", int(str(type_of(x).dims[-1])), bias=False)
