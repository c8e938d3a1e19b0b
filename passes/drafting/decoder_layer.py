"""One decoder layer in the target's proportions, for drafters that attend to what came before.

What it builds, as IR (``source`` is x, or whatever the attention is to read instead)::

    %q: f32[B,H,T,D] = graftwork.rotary(linear(%source, @name.self_attn.q_proj.weight), %cos, %sin)
    %y: f32[B,H,T,D] = graftwork.attention(%q, %k, %v, layer=8, scale=0.125)
    %x: f32[B,T,N] = aten.add.Tensor(%x, linear(%y, @name.self_attn.o_proj.weight))
    %n: f32[B,T,N] = graftwork.rms_norm(%x, @name.post_attention_layernorm.weight, eps=1e-06)
    %x: f32[B,T,N] = aten.add.Tensor(%x, down(graftwork.glu(gate(%n), up(%n), activation="silu")))

Weights are called as in llama checkpoints. `insert_kv_cache` gives the attention its cache, which
is the function's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import (
    Function,
    PassError,
    Sym,
    TensorType,
    derivation,
    derive,
    type_of,
)
from ...ir.rewrite.subgraph import fresh_name
from .grafts import Graft

A, G = torch.ops.aten, torch.ops.graftwork
B, T = Sym("B"), Sym("T")

THETA = 10000.0
"""Base of the rotary frequencies where the target has no rotary embedding."""

DIM = 64
"""Channels of a head where no layer of the target has heads."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer. heads, groups: query and key-value heads of `dim` channels each. inner: of
    the gated MLP, 0 for none. eps: of the norms."""

    heads: int
    groups: int
    dim: int
    inner: int
    eps: float

    @classmethod
    def of(cls, step: Function, owner: str, hidden: int) -> LayerShape:
        """The sizes of the target's last layer; where none attends, of `hidden` channels in heads
        of `DIM`. Errors: `PassError` where neither says anything."""
        attentions = step.calls(G.attention.default)
        if not attentions and not hidden:
            raise PassError(
                f"{owner}: step has no graftwork.attention to take the layer's shape of"
            )
        # A recurrence's gate may run along the tokens instead.
        widths = [type_of(node).dims[-1] for node in step.calls(G.glu.default)]
        gated = [width for width in widths if isinstance(width, int)]
        norms = [float(n.kwargs["eps"]) for n in step.calls(G.rms_norm.default)]  # type: ignore[arg-type]
        if attentions:
            query, key = (type_of(node).dims for node in attentions[-1].all_input_nodes[:2])
            heads, groups, dim = int(str(query[1])), int(str(key[1])), int(str(query[3]))
        else:
            heads = groups = -(-hidden // DIM)
            dim = DIM
        return cls(
            heads=heads,
            groups=groups,
            dim=dim,
            # Experts' projections are not `glu`, and a plain MLP is four times as wide.
            inner=gated[-1] if gated else 4 * hidden,
            eps=norms[-1] if norms else 1e-6,
        )


@dataclass(frozen=True)
class Angles:
    """What a rotation takes besides x: cosines and sines [B,T,R], and how channels are paired."""

    cos: torch.fx.Node
    sin: torch.fx.Node
    interleaved: bool = False

    def rotate(self, graft: Graft, x: torch.fx.Node) -> torch.fx.Node:
        """x [B,H,T,D] rotated."""
        options = {"interleaved": True} if self.interleaved else {}
        return graft.call(G.rotary.default, x, self.cos, self.sin, **options)


def angles_at(graft: Graft, positions: torch.fx.Node, dim: int) -> Angles:
    """Angles for positions i64[B,T] of heads of `dim` channels: the target's own if it has some
    that depend on positions alone, else new tables."""
    for node in graft.step.calls(G.rotary.default):
        cos, sin = node.all_input_nodes[1:3]
        if 2 * _size(cos, -1) > dim:
            continue
        given: dict[Any, torch.fx.Node] = {graft.step.input("positions"): positions}
        try:
            copies = [graft.copy(given, table) for table in (cos, sin)]
        except PassError:  # they take more than positions
            break
        return Angles(copies[0], copies[1], bool(node.kwargs.get("interleaved", False)))
    tables = [_table(graft, kind, dim // 2) for kind in ("cos", "sin")]
    looked_up = [graft.call(A.embedding.default, table, positions) for table in tables]
    return Angles(looked_up[0], looked_up[1])


def decoder_layer(
    graft: Graft,
    x: torch.fx.Node,
    angles: Angles,
    name: str,
    shape: LayerShape,
    *,
    source: torch.fx.Node | None = None,
    rows: torch.fx.Node | None = None,
    head_norms: bool = False,
) -> torch.fx.Node:
    """x [B,T,N] after attention and MLP, both added to it. See the module docstring.

    name: prefix of the weights. source: what the attention reads, already normed ([B,T,M]; x itself
    if not given). rows, head_norms: see `attention`.
    """
    source = x if source is None else source
    read = attention(graft, source, angles, name, shape, rows, head_norms=head_norms)
    x = graft.call(
        A.add.Tensor, x, graft.linear(read, f"{name}.self_attn.o_proj", _size(x, -1), bias=False)
    )
    if not shape.inner:
        return x
    normed = graft.rms_norm(x, f"{name}.post_attention_layernorm", shape.eps)
    return graft.call(A.add.Tensor, x, gated_mlp(graft, normed, f"{name}.mlp", shape.inner))


def attention(
    graft: Graft,
    x: torch.fx.Node,
    angles: Angles,
    name: str,
    shape: LayerShape,
    rows: torch.fx.Node | None = None,
    *,
    head_norms: bool = False,
) -> torch.fx.Node:
    """Causal self-attention [B,T,heads*dim] of x [B,T,M], before the output projection.

    rows: what keys and values are made of, [B,T,M]; x itself if not given. head_norms: whether
    queries and keys are normed head by head before they are rotated, as Qwen3's are.
    """
    rows = x if rows is None else rows

    def heads(kind: str, count: int) -> torch.fx.Node:
        read = x if kind == "q" else rows
        y = graft.linear(read, f"{name}.self_attn.{kind}_proj", count * shape.dim, bias=False)
        y = graft.call(A.reshape.default, y, [B, T, count, shape.dim])
        if head_norms and kind != "v":
            y = graft.rms_norm(y, f"{name}.self_attn.{kind}_norm", shape.eps)
        return graft.call(A.permute.default, y, [0, 2, 1, 3])

    query = angles.rotate(graft, heads("q", shape.heads))
    key = angles.rotate(graft, heads("k", shape.groups))
    value = heads("v", shape.groups)
    layer, scale = next_layer(graft), shape.dim**-0.5
    y = graft.call(G.attention.default, query, key, value, layer=layer, scale=scale)
    y = graft.call(A.permute.default, y, [0, 2, 1, 3])
    return graft.call(A.reshape.default, y, [B, T, shape.heads * shape.dim])


def gated_mlp(
    graft: Graft,
    x: torch.fx.Node,
    name: str,
    inner: int,
    *,
    by: torch.fx.Node | None = None,
    outputs: int | None = None,
) -> torch.fx.Node:
    """down(silu(gate(by)) * up(x)), with as many channels as x unless said; by: x itself if not
    given."""
    gate = graft.linear(x if by is None else by, f"{name}.gate_proj", inner, bias=False)
    up = graft.linear(x, f"{name}.up_proj", inner, bias=False)
    y = graft.call(G.glu.default, gate, up, activation="silu")
    return graft.linear(y, f"{name}.down_proj", outputs or _size(x, -1), bias=False)


def next_layer(graft: Graft) -> int:
    """A layer number that no attention of the program has."""
    return free_layer([*graft.program.functions.values(), graft.fn])


def free_layer(functions: Iterable[Function]) -> int:
    """A layer number that no attention of the functions has."""
    nodes = [node for fn in functions for node in fn.calls(G.attention.default)]
    return 1 + max((int(node.kwargs["layer"]) for node in nodes), default=-1)  # type: ignore[arg-type]


def _table(graft: Graft, kind: str, half: int) -> torch.fx.Node:
    rows = graft.program.info.context
    name = fresh_name(graft.weights, f"positions.{kind}")
    type = TensorType(graft.dtype, (rows, half))
    options = {"kind": kind, "rows": rows, "half": half, "dtype": graft.dtype}
    return graft.constant(derive(name, type, angles, **options))


@derivation
def angles(*, kind: str, rows: int, half: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosines or sines [rows,half] of the positions' angles."""
    rates = THETA ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * rates
    return (angle.cos() if kind == "cos" else angle.sin()).to(dtype)


def _size(node: torch.fx.Node, axis: int) -> int:
    return int(str(type_of(node).dims[axis]))
