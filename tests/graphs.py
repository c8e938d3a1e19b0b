"""Random valid programs for Hypothesis: a residual stream with blocks of every kind of op.

``@given(programs())`` gives canonical-stage programs with weights in memory;
``programs(stage="traced")`` keeps to ops that a frontend gives. Draw from it to compare a pass's
input with its output (`feeds`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from hypothesis import strategies as st

from graftwork.ir import (
    Function,
    ModelInfo,
    Program,
    Site,
    Sym,
    TensorType,
    Weight,
    WeightStore,
    type_of,
)

A, G = torch.ops.aten, torch.ops.graftwork
B, T = Sym("B"), Sym("T")
H, VOCAB = 8, 13
Draw = Callable[[Any], Any]


class Maker:
    """Builds blocks on values of type [B,T,H]."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.fn = draw, Function("step")
        self.weights: dict[str, Weight] = {}
        self.layers = 0
        self.site = Site()

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.fn.call(target, *args, site=self.site, **kwargs)

    def weight(self, *shape: int) -> torch.fx.Node:
        """A new weight, or now and then an old one of that shape (tied weights)."""
        same = [w for w in self.weights.values() if w.type.shape == shape]
        if same and self.draw(st.integers(0, 4)) == 0:
            return self.fn.weight(self.draw(st.sampled_from(same)))
        name = f"blocks.{len(self.weights)}.weight"
        generator = torch.Generator().manual_seed(len(self.weights))
        data = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        self.weights[name] = Weight.of(name, data)
        return self.fn.weight(self.weights[name])

    # -- blocks

    def linear(self, x: torch.fx.Node) -> torch.fx.Node:
        bias = [self.weight(H)] if self.draw(st.booleans()) else []
        return self.call(A.linear.default, x, self.weight(H, H), *bias)

    def activation(self, x: torch.fx.Node) -> torch.fx.Node:
        kind = self.draw(st.sampled_from(("silu", "gelu", "tanh", "relu", "sigmoid")))
        return self.call(getattr(A, kind).default, x)

    def scalar(self, x: torch.fx.Node) -> torch.fx.Node:
        op = self.draw(st.sampled_from((A.mul.Tensor, A.add.Tensor, A.sub.Tensor)))
        value = self.draw(st.sampled_from((2, 0.5, -1, 1e-5)))
        return self.call(op, x, value)

    def plain_norm(self, x: torch.fx.Node) -> torch.fx.Node:
        """An RMS norm as models spell it."""
        square = self.call(A.pow.Tensor_Scalar, x, 2)
        mean = self.call(A.mean.dim, square, [self.draw(st.sampled_from((-1, 2)))], True)
        scale = self.call(A.rsqrt.default, self.call(A.add.Tensor, mean, 1e-5))
        pair = [x, scale] if self.draw(st.booleans()) else [scale, x]
        normed = self.call(A.mul.Tensor, *pair)
        return self.call(A.mul.Tensor, self.weight(H), normed)

    def cast(self, x: torch.fx.Node) -> torch.fx.Node:
        dtype = self.draw(st.sampled_from((torch.bfloat16, torch.float64)))
        narrow = self.call(A._to_copy.default, x, dtype=dtype)
        return self.call(A._to_copy.default, narrow, dtype=torch.float32)

    def swap_parts(self, x: torch.fx.Node) -> torch.fx.Node:
        if self.draw(st.booleans()):
            split = self.call(A.split_with_sizes.default, x, [3, 5], -1)
            parts = [self.fn.item(split, 1), self.fn.item(split, 0)]
        else:
            parts = [self.call(A.slice.Tensor, x, 2, *ends) for ends in ((4, 8), (0, 4))]
        return self.call(A.cat.default, parts, -1)

    def flatten(self, x: torch.fx.Node) -> torch.fx.Node:
        flat = self.call(A.view.default, x, [B * T, H])
        return self.call(A.view.default, self.linear(flat), [B, T, H])

    def softmax(self, x: torch.fx.Node) -> torch.fx.Node:
        return self.call(A.softmax.int, x, -1)

    def attention(self, x: torch.fx.Node) -> torch.fx.Node:
        def heads(count: int) -> torch.fx.Node:
            flat = self.call(A.linear.default, x, self.weight(count * 4, H))
            return self.call(
                A.transpose.int, self.call(A.view.default, flat, [B, T, count, 4]), 1, 2
            )

        options = self.draw(st.sampled_from(({}, {"window": 3}, {"chunk": 2})))
        q, k, v = heads(2), heads(1), heads(1)
        y = self.call(G.attention.default, q, k, v, layer=self.layers, scale=0.5, **options)
        self.layers += 1
        merged = self.call(A.clone.default, self.call(A.transpose.int, y, 1, 2))
        return self.call(A.view.default, merged, [B, T, H])

    def norm(self, x: torch.fx.Node) -> torch.fx.Node:
        if self.draw(st.booleans()):
            return self.call(G.rms_norm.default, x, self.weight(H), eps=1e-6)
        return self.call(G.layer_norm.default, x, self.weight(H), self.weight(H), eps=1e-5)

    def glu(self, x: torch.fx.Node) -> torch.fx.Node:
        kind = self.draw(st.sampled_from(("silu", "gelu", "relu")))
        return self.call(G.glu.default, self.linear(x), self.linear(x), activation=kind)

    def add_norm(self, x: torch.fx.Node) -> torch.fx.Node:
        pair = self.call(G.add_rms_norm.default, x, self.linear(x), self.weight(H), eps=1e-6)
        return self.call(A.add.Tensor, self.fn.item(pair, 0), self.fn.item(pair, 1))

    def program(self, stage: str, blocks: int) -> Program:
        """Embedding, blocks with and without skip connections, head."""
        common = [
            self.linear, self.activation, self.scalar, self.plain_norm, self.cast,
            self.swap_parts, self.flatten, self.softmax, self.attention,
        ]  # fmt: skip
        raised = [self.norm, self.glu, self.add_norm] if stage == "canonical" else []
        tokens = self.fn.add_input("tokens", TensorType.parse("i64[B,T]"))
        self.fn.add_input("positions", TensorType.parse("i64[B,T]"))
        x = self.call(A.embedding.default, self.weight(VOCAB, H), tokens)
        values = [x]
        for index in range(blocks):
            named = self.draw(st.booleans())
            self.site = Site(f"blocks.{index}", index, "model.py:1") if named else Site()
            block = self.draw(st.sampled_from([*common, *raised]))
            y = block(self.draw(st.sampled_from(values)))
            assert str(type_of(y)) == "f32[B,T,8]"
            if self.draw(st.booleans()):
                y = self.call(A.add.Tensor, values[-1], y)
            values.append(y)
        logits = self.call(A.linear.default, values[-1], self.weight(VOCAB, H))
        self.fn.set_outputs({"logits": logits})
        info = ModelInfo("random", VOCAB, 64, eos=(1,))
        store = WeightStore(self.weights).only(self.fn.weights)
        return Program("random", {"step": self.fn}, store, info, stage=stage)


@st.composite
def programs(draw: Any, stage: str = "canonical", blocks: int = 8) -> Program:
    """A random program of up to `blocks` blocks."""
    count = draw(st.integers(1, blocks))
    return Maker(draw).program(stage, count)


def symbols_of(fn: Function) -> set[str]:
    """Names of symbols in the types of a function's inputs."""
    dims = [dim for node in fn.inputs for dim in type_of(node).dims]
    return set().union(*(dim.symbols for dim in dims if isinstance(dim, Sym)), set())
