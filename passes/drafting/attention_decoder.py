"""Clover's attention decoder: how a state hears one more token.

What it builds, as IR (``x`` is the state, ``e`` the token's embedding, heads of D channels)::

    %q: f32[B,T,N,D] = linear(rms_norm(%x, @name.norm.weight), @name.q.weight, @name.q.bias)
    %k: f32[B,T,N,D] = linear(%e, @name.k.weight, @name.k.bias)
    %v: f32[B,T,N,D] = linear(%e, @name.v.weight, @name.v.bias)
    %y: f32[B,T,H] = %x + %v * cosine(%q, %k)

A head's values of the token are weighed by the cosine between its query, made of the normed state,
and its key. At first values are zero and the state passes. Source: Xiao et al., "Clover: Regressive
Lightweight Speculative Decoding with Sequential Knowledge" and "Clover-2" (2024).
"""

from __future__ import annotations

from math import gcd

import torch
import torch.fx

from ...ir import Sym
from .decoder_layer import LayerShape
from .grafts import Graft

A = torch.ops.aten
B, T = Sym("B"), Sym("T")
LEAST = 1e-6
"""Keeps the cosine of nothing finite."""


def attention_decoder(graft: Graft, x: torch.fx.Node, e: torch.fx.Node, name: str) -> torch.fx.Node:
    """x [B,T,H] and what it hears of e [B,T,H]. name: prefix of the weights."""
    shape = LayerShape.of(graft.step, graft.owner, graft.hidden)
    size = graft.hidden
    count = gcd(shape.heads, size)  # of heads whose channels make the model's
    own = graft.rms_norm(x, f"{name}.norm", shape.eps)

    def heads(source: torch.fx.Node, kind: str, init: str) -> torch.fx.Node:
        y = graft.linear(source, f"{name}.{kind}", size, init=init)
        return graft.call(A.reshape.default, y, [B, T, count, size // count])

    def dot(a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
        product = graft.call(A.mul.Tensor, a, b)
        return graft.call(A.sum.dim_IntList, product, [-1], True)

    query, key, value = heads(own, "q", "eye"), heads(e, "k", "eye"), heads(e, "v", "zeros")
    sizes = graft.call(A.mul.Tensor, dot(query, query), dot(key, key))
    scale = graft.call(A.rsqrt.default, graft.call(A.add.Tensor, sizes, LEAST))
    gate = graft.call(A.mul.Tensor, dot(query, key), scale)
    read = graft.call(A.mul.Tensor, value, gate)
    return graft.call(A.add.Tensor, x, graft.call(A.reshape.default, read, [B, T, size]))
