"""Small canonical-stage llamas built by hand, for tests that need a program but no frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tiny import once

from graftwork.ir import Function, ModelInfo, Program, TensorType, Weight, WeightStore
from graftwork.ir.types import Sym
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.fusing.fuse_gate_up import FuseGateUp
from graftwork.passes.fusing.fuse_qkv import FuseQkv
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits

A = torch.ops.aten
G = torch.ops.graftwork


@dataclass(frozen=True)
class Shape:
    """Sizes and switches of a handmade llama."""

    layers: int = 2
    heads: int = 4
    groups: int = 2
    dim: int = 16
    value_dim: int | None = None
    rotary: int | None = None  # rotated channels; None: all; 0: no rotary embedding
    interleaved: bool = False
    inner: int = 48
    vocab: int = 61
    context: int = 96
    window: int | None = None
    whole: tuple[int, ...] = ()  # layers that it does not bound
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False
    qk_norm: bool = False
    bias: bool = False
    tied: bool = False
    layer_norm: bool = False
    activation: str = "silu"
    dtype: torch.dtype = torch.float32

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.dim


@once
def llama(shape: Shape | None = None, seed: int = 0) -> Program:
    """A canonical-stage program: step(tokens, positions) -> logits, with random weights."""
    return _Builder(shape or Shape(), seed).build()


@once
def cached_llama(
    shape: Shape | None = None, *, trees: bool = True, joined: bool = True, seed: int = 0
) -> Program:
    """The same with joined products, caches, chosen logits and argmax: what backends compile."""
    program = llama(shape, seed)
    joining = (FuseQkv(), FuseGateUp()) if joined else ()
    branching = (AcceptTrees(),) if trees else ()
    for step in (*joining, InsertKvCache(), *branching, PickLogits(), AddArgmax()):
        program = step.run(program).program
    return program


class _Builder:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.fn = shape, Function("step")
        self.random = torch.Generator().manual_seed(seed)
        self.weights: dict[str, Weight] = {}

    def weight(self, name: str, *dims: int, scale: float = 0.0, near: float = 0.0) -> Any:
        """A reference to a new random weight; scale 0 means 1/sqrt(last dim)."""
        if name not in self.weights:
            spread = scale or dims[-1] ** -0.5
            data = torch.randn(dims, generator=self.random) * spread + near
            self.weights[name] = Weight.of(name, data.to(self.shape.dtype))
        return self.fn.weight(self.weights[name])

    def table(self, kind: str) -> Any:
        """A reference to the cosine or sine table."""
        shape = self.shape
        half = (shape.rotary or shape.dim) // 2
        angle = torch.outer(torch.arange(shape.context), 10000.0 ** -(torch.arange(half) / half))
        data = {"cos": angle.cos(), "sin": angle.sin()}[kind].to(shape.dtype)
        self.weights[kind] = Weight.of(kind, data)
        return self.fn.weight(self.weights[kind])

    def build(self) -> Program:
        """Embedding, layers, final norm, head."""
        shape, fn = self.shape, self.fn
        tokens = fn.add_input("tokens", TensorType.parse("i64[B,T]"))
        self.positions = fn.add_input("positions", TensorType.parse("i64[B,T]"))
        self.angles = None
        if shape.rotary != 0:
            tables = [self.table(kind) for kind in ("cos", "sin")]
            self.angles = [fn.call(A.embedding.default, t, self.positions) for t in tables]
        embed = self.weight("embed", shape.vocab, shape.hidden, scale=1.0)
        x = fn.call(A.embedding.default, embed, tokens)
        x = fn.call(G.hidden.default, x, layer=-1, point="embedding")
        for layer in range(shape.layers):
            x = fn.call(A.add.Tensor, x, self.attention(layer, x))
            x = fn.call(G.hidden.default, x, layer=layer, point="attention")
            x = fn.call(A.add.Tensor, x, self.mlp(layer, x))
            x = fn.call(G.hidden.default, x, layer=layer, point="block")
        head = "embed" if shape.tied else "head"
        normed = self.norm("norm", x)
        weight = self.weight(head, shape.vocab, shape.hidden)
        fn.set_outputs({"logits": fn.call(A.linear.default, normed, weight)})
        info = ModelInfo("llama", shape.vocab, shape.context, eos=(1,))
        return Program("handmade", {"step": fn}, WeightStore(self.weights), info, stage="canonical")

    def norm(self, name: str, x: Any) -> Any:
        """An RMS or layer norm over the last axis."""
        width = x.meta["type"].dims[-1]
        scale = self.weight(f"{name}.weight", width, scale=0.1, near=1.0)
        if self.shape.layer_norm:
            shift = self.weight(f"{name}.bias", width, scale=0.1)
            return self.fn.call(G.layer_norm.default, x, scale, shift, eps=1e-5)
        return self.fn.call(G.rms_norm.default, x, scale, eps=1e-6)

    def linear(self, name: str, x: Any, rows: int) -> Any:
        """x times a new weight [rows, columns], with a bias if the shape says so."""
        weight = self.weight(f"{name}.weight", rows, x.meta["type"].dims[-1])
        if not self.shape.bias:
            return self.fn.call(A.linear.default, x, weight)
        bias = self.weight(f"{name}.bias", rows, scale=0.1)
        return self.fn.call(A.linear.default, x, weight, bias)

    def heads_of(self, name: str, x: Any, heads: int, dim: int, normed: bool) -> Any:
        """A projection as [B,heads,T,dim]."""
        fn = self.fn
        flat = self.linear(name, x, heads * dim)
        split = fn.call(A.view.default, flat, [Sym("B"), Sym("T"), heads, dim])
        if normed:
            split = self.norm(f"{name}.norm", split)
        return fn.call(A.transpose.int, split, 1, 2)

    def rotate(self, x: Any) -> Any:
        """The rotary embedding, if there is one."""
        if self.angles is None:
            return x
        options = {"interleaved": True} if self.shape.interleaved else {}
        return self.fn.call(G.rotary.default, x, *self.angles, **options)

    def attention(self, layer: int, x: Any) -> Any:
        """Norm, projections, attention, output projection."""
        shape, fn, name = self.shape, self.fn, f"layers.{layer}.attention"
        normed = self.norm(f"layers.{layer}.norm1", x)
        value_dim = shape.value_dim or shape.dim
        q = self.heads_of(f"{name}.q", normed, shape.heads, shape.dim, shape.qk_norm)
        k = self.heads_of(f"{name}.k", normed, shape.groups, shape.dim, shape.qk_norm)
        v = self.heads_of(f"{name}.v", normed, shape.groups, value_dim, False)
        sinks = self.weight(f"{name}.sinks", shape.heads, scale=1.0) if shape.sinks else None
        slopes = self.weight(f"{name}.slopes", shape.heads, scale=0.1) if shape.slopes else None
        options: Mapping[str, Any] = {n: getattr(shape, n) for n in ("window", "chunk", "softcap")}
        far = ("window",) if layer in shape.whole else ()
        given = {n: value for n, value in options.items() if value is not None and n not in far}
        y = fn.call(
            G.attention.default,
            *(self.rotate(q), self.rotate(k), v, sinks, slopes),
            layer=layer,
            scale=shape.dim**-0.5,
            **given,
        )
        y = fn.call(A.transpose.int, y, 1, 2)
        y = fn.call(A.clone.default, y, memory_format=torch.contiguous_format)
        y = fn.call(A.view.default, y, [Sym("B"), Sym("T"), shape.heads * value_dim])
        return self.linear(f"{name}.o", y, shape.hidden)

    def mlp(self, layer: int, x: Any) -> Any:
        """Norm, gated feed-forward block."""
        shape, name = self.shape, f"layers.{layer}.mlp"
        normed = self.norm(f"layers.{layer}.norm2", x)
        gate = self.linear(f"{name}.gate", normed, shape.inner)
        up = self.linear(f"{name}.up", normed, shape.inner)
        y = self.fn.call(G.glu.default, gate, up, activation=shape.activation)
        return self.linear(f"{name}.down", y, shape.hidden)


def decoded(feed: Callable[[int], int], prompt: Sequence[int], count: int) -> list[int]:
    """A text of `count` tokens behind a prompt. feed: takes a token, gives the likeliest next."""
    text = list(prompt)
    for place in range(len(prompt) + count - 1):
        best = feed(text[place])
        if place + 1 == len(text):
            text.append(best)
    return text
