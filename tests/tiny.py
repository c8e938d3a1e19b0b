"""A tiny random llama as a canonical-stage program, by hand: tests need no frontend for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec

import torch
import torch.fx

from graftwork.ir import (
    Function,
    ModelInfo,
    Program,
    Site,
    Sym,
    TensorType,
    Weight,
    WeightStore,
)
from graftwork.ir.weights import Held
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.engine.base import Pass, all_passes
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits

A, G = torch.ops.aten, torch.ops.graftwork
B, T = Sym("B"), Sym("T")

PROMPTS = torch.tensor([[0, 0, 0, 7, 3], [0, 4, 9, 9, 1], [5, 6, 7, 8, 9], [0, 0, 0, 0, 30]])
MASK = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
"""A batch of texts of different lengths, padded on the left."""


P = ParamSpec("P")


def once(make: Callable[P, Program]) -> Callable[P, Program]:
    """Decorator: of the same arguments a program is made once, and each caller gets functions that
    may be edited. Errors: `AssertionError` if somebody has changed a weight in place."""
    kept = lru_cache(maxsize=64)(make)

    @wraps(make)
    def handed_out(*args: P.args, **kwargs: P.kwargs) -> Program:
        program = kept(*args, **kwargs)
        held = [
            weight for weight in program.weights.values() if isinstance(weight.made.target, Held)
        ]
        changed = [weight.name for weight in held if weight.load()._version]
        assert not changed, f"an earlier test has written to {changed}"
        functions = {name: function.copy() for name, function in program.functions.items()}
        return program.replace(functions=functions, states=dict(program.states))

    return handed_out


def named(name: str, **options: object) -> Pass:
    """A pass as recipes call it, which is how those that are derived from records are found."""
    return all_passes()[name](**options)


def in_int8(**options: Any) -> QuantizeWeights:
    """What the recipe int8 does to weights."""
    return QuantizeWeights(bits=8, group=0, symmetric=True, scales="f32", embedding=True, **options)


class _Builder:
    """Llama's forward pass, one `Function.call` an op."""

    def __init__(self, heads: int, groups: int, dim: int, seed: int, dtype: torch.dtype) -> None:
        self.heads, self.groups, self.dim, self.dtype = heads, groups, dim, dtype
        self.hidden = heads * dim
        self.fn = Function("step")
        self.weights: dict[str, Weight] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def weight(self, name: str, *shape: int) -> torch.fx.Node:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        if name not in self.weights:
            tensor = torch.randn(shape, generator=self.generator) * scale
            self.weights[name] = Weight.of(name, tensor.to(self.dtype))
        return self.fn.weight(self.weights[name])

    def linear(self, x: torch.fx.Node, name: str, rows: int, columns: int) -> torch.fx.Node:
        return self.fn.call(A.linear.default, x, self.weight(name, rows, columns))

    def heads_of(self, x: torch.fx.Node, name: str, count: int) -> torch.fx.Node:
        y = self.linear(x, name, count * self.dim, self.hidden)
        y = self.fn.call(A.view.default, y, [B, T, count, self.dim])
        return self.fn.call(A.transpose.int, y, 1, 2)

    def layer(self, x: torch.fx.Node, index: int, angles: list[torch.fx.Node]) -> torch.fx.Node:
        fn, path, inner = self.fn, f"layers.{index}.", 2 * self.hidden
        site = Site(path[:-1], index)
        normed = fn.call(
            G.rms_norm.default, x, self.weight(path + "norm1", self.hidden), eps=1e-6, site=site
        )
        q = fn.call(G.rotary.default, self.heads_of(normed, path + "q", self.heads), *angles)
        k = fn.call(G.rotary.default, self.heads_of(normed, path + "k", self.groups), *angles)
        v = self.heads_of(normed, path + "v", self.groups)
        y = fn.call(G.attention.default, q, k, v, layer=index, scale=self.dim**-0.5, site=site)
        y = fn.call(A.transpose.int, y, 1, 2)
        y = fn.call(A.reshape.default, y, [B, T, self.hidden])
        y = self.linear(y, path + "o", self.hidden, self.hidden)
        x = fn.call(A.add.Tensor, x, y)
        x = fn.call(G.hidden.default, x, layer=index, point="attention", site=site)
        normed = fn.call(G.rms_norm.default, x, self.weight(path + "norm2", self.hidden), eps=1e-6)
        gate = self.linear(normed, path + "gate", inner, self.hidden)
        up = self.linear(normed, path + "up", inner, self.hidden)
        y = fn.call(G.glu.default, gate, up, activation="silu")
        x = fn.call(A.add.Tensor, x, self.linear(y, path + "down", self.hidden, inner))
        return fn.call(G.hidden.default, x, layer=index, point="block", site=site)

    def inputs(self, context: int) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
        """Tokens, and the angles of the positions."""
        tokens = self.fn.add_input("tokens", TensorType.parse("i64[B,T]"))
        positions = self.fn.add_input("positions", TensorType.parse("i64[B,T]"))
        rates = 100.0 ** (-torch.arange(0, self.dim, 2) / self.dim)
        angle = torch.arange(context)[:, None] * rates
        self.weights["cos"] = Weight.of("cos", angle.cos().to(self.dtype))
        self.weights["sin"] = Weight.of("sin", angle.sin().to(self.dtype))
        angles = [
            self.fn.call(A.embedding.default, self.weight(name, context, self.dim // 2), positions)
            for name in ("cos", "sin")
        ]
        return tokens, angles


@once
def tiny_llama(
    layers: int = 2,
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 8,
    vocab: int = 32,
    context: int = 128,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Program:
    """A canonical-stage program ``step(tokens, positions) -> logits [B,T,vocab]`` in a dtype."""
    build = _Builder(heads, groups, dim, seed, dtype)
    fn = build.fn
    tokens, angles = build.inputs(context)
    x = fn.call(A.embedding.default, build.weight("embed", vocab, build.hidden), tokens)
    x = fn.call(G.hidden.default, x, layer=-1, point="embedding")
    for index in range(layers):
        x = build.layer(x, index, angles)
    x = fn.call(G.rms_norm.default, x, build.weight("norm", build.hidden), eps=1e-6)
    fn.set_outputs({"logits": build.linear(x, "head", vocab, build.hidden)})
    info = ModelInfo("llama", vocab, context, eos=(0,))
    return Program("tiny", {"step": fn}, WeightStore(build.weights), info, stage="canonical")


@once
def layer_ahead(
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 8,
    vocab: int = 32,
    context: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Program:
    """A layer that predicts a token further ahead than `tiny_llama` of these sizes: what a
    frontend makes of it, canonical."""
    build = _Builder(heads, groups, dim, 5, dtype)
    fn, size = build.fn, heads * dim
    tokens, angles = build.inputs(context)
    hidden = fn.add_input("hidden", TensorType(dtype, (B, T, size)))
    x = fn.call(A.embedding.default, build.weight("embed", vocab, size), tokens)
    x = fn.call(G.rms_norm.default, x, build.weight("enorm", size), eps=1e-6)
    y = fn.call(G.rms_norm.default, hidden, build.weight("hnorm", size), eps=1e-6)
    x = build.linear(fn.call(A.cat.default, [x, y], -1), "proj", size, 2 * size)
    x = build.layer(x, 0, angles)
    x = fn.call(G.rms_norm.default, x, build.weight("norm", size), eps=1e-6)
    fn.set_outputs({"logits": build.linear(x, "head", vocab, size), "hidden": x})
    info = ModelInfo("llama", vocab, context, eos=(0,))
    return Program("ahead", {"step": fn}, WeightStore(build.weights), info, stage="canonical")


@once
def cached_llama(trees: bool = False, **shape: int) -> Program:
    """`tiny_llama` with a cache, chosen logits and an argmax: what backends compile."""
    steps = [InsertKvCache(), *[AcceptTrees()] * trees, PickLogits(), AddArgmax()]
    program, _ = run_passes(tiny_llama(**shape), [Step(step) for step in steps])
    return program


def drafting_llama(*passes: Pass) -> Program:
    """`tiny_llama` after passes that make it draft, with what every drafter may need."""
    steps = [*passes, InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax()]
    return run_passes(tiny_llama(), [Step(step) for step in steps])[0]
