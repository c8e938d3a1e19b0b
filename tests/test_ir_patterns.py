"""Patterns: a model's code, traced, is found in the program that a frontend makes of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graftwork.frontends.importer import import_exported
from graftwork.ir import (
    Function,
    GraftworkError,
    Match,
    Rule,
    Sym,
    TensorType,
    Weight,
    apply_rules,
    decompositions,
    type_of,
)
from graftwork.ir.rewrite.normal import normal_call
from graftwork.ir.rewrite.pattern import InputSpec, parse_spec, trace_pattern

A = torch.ops.aten
Tensor = torch.Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rotate_pairs(x: Tensor, cos: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x + turned * cos


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gated(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = F.linear(x, up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * value, down)


def split_in_three(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = F.linear(x, weight).split(12, dim=2)
    return q * k + v


def attend(q: Tensor, keys: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, keys) / 2.0
    scores = scores.masked_fill(mask, -1e9)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    merged = torch.matmul(weights, v).transpose(1, 2).contiguous()
    return merged.reshape(q.shape[0], q.shape[2], -1)


def heads(x: Tensor, weight: Tensor) -> Tensor:
    y = F.linear(x, weight).view(x.shape[0], x.shape[1], -1, 4)
    return y.permute(0, 2, 1, 3).clone()


def repeat_groups(k: Tensor) -> Tensor:
    wide = k[:, :, None, :, :].expand(k.shape[0], 2, 3, k.shape[2], 4)
    return wide.reshape(k.shape[0], 6, k.shape[2], 4) * 2.0


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (12,), weight, bias, 1e-5) + x


CODE: dict[str, tuple[Callable[..., Tensor], dict[str, str]]] = {
    "rms": (rms, {"x": "F[...,H]", "weight": "@F[H]", "eps": "float"}),
    "rotate": (rotate, {"x": "F[B,2,T,2*R]", "cos": "F[B,T,2*R]", "sin": "F[B,T,2*R]"}),
    "rotate_pairs": (rotate_pairs, {"x": "F[B,T,12]", "cos": "F[B,T,12]"}),
    "gelu": (gelu, {"x": "F[...]"}),
    "gated": (gated, {"x": "F[...,H]", "up": "@F[2*I,H]", "down": "@F[H,I]"}),
    "split_in_three": (split_in_three, {"x": "F[B,T,12]", "weight": "@F[36,12]"}),
    "attend": (
        attend,
        {"q": "F[B,H,T,D]", "keys": "F[B,H,D,T]", "v": "F[B,H,T,D]", "mask": "bool[1,1,T,T]"},
    ),
    "heads": (heads, {"x": "F[B,T,12]", "weight": "@F[12,12]"}),
    "repeat_groups": (repeat_groups, {"k": "F[B,2,T,4]"}),
    "normed": (normed, {"x": "F[B,T,12]", "weight": "@F[12]", "bias": "@F[12]"}),
}
CONCRETE = {"H": 12, "I": 5, "R": 6, "D": 4}
BOUND = {"attend": {"H": 3}}


class Model(nn.Module):
    """Makes the code's inputs from embedded tokens and parameters, and runs it."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.code, inputs = CODE[name]
        self.specs = {n: parse_spec(text) for n, text in inputs.items()}
        self.sizes = CONCRETE | BOUND.get(name, {})
        for key, spec in self.specs.items():
            if not isinstance(spec, InputSpec):
                continue
            dims = [d.bind(self.sizes) if isinstance(d, Sym) else d for d in spec.dims]
            fixed = [d for d in dims if isinstance(d, int)]
            shape = fixed if spec.weight else [50, math.prod(fixed)]
            setattr(self, key, nn.Parameter(torch.randn(shape).to(dtype)))

    def argument(self, key: str, tokens: Tensor) -> Any:
        spec = self.specs[key]
        if not isinstance(spec, InputSpec):
            return 1e-5
        table = getattr(self, key)
        if spec.weight:
            return table
        dims = [d.bind(self.sizes) if isinstance(d, Sym) else d for d in spec.dims]
        fixed = [d for d in dims if isinstance(d, int)]
        flat = F.embedding(tokens, table)
        if spec.dtype == torch.bool:
            steps = torch.arange(tokens.shape[1])
            return (steps[None, :] > steps[:, None])[None, None]
        if spec.loose or len(dims) == 3:
            return flat
        split = flat.view(*tokens.shape, *fixed)
        return split.permute(0, 2, 3, 1) if dims[-1] == Sym("T") else split.transpose(1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.code(**{key: self.argument(key, tokens) for key in self.specs})


def imported(name: str, dtype: torch.dtype) -> Function:
    """The code as a frontend imports it."""
    model = Model(name, dtype)
    batch, width = torch.export.Dim("B", min=1, max=64), torch.export.Dim("T", min=1, max=64)
    tokens = torch.zeros(3, 7, dtype=torch.int64)
    exported = torch.export.export(
        model, (tokens,), dynamic_shapes=({0: batch, 1: width},), strict=False
    )
    held = dict(model.named_parameters())
    return import_exported(exported, "", lambda key: Weight.of(key, held[key].detach())).fn


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CODE)
def test_patterns_are_found_in_what_frontends_give(name: str, dtype: torch.dtype) -> None:
    found: list[Match] = []

    def note(match: Match) -> str:
        found.append(match)
        return "only looking"

    code, inputs = CODE[name]
    rule = Rule(name, inputs, code, lambda build, m: m.root, guard=note)
    fn = imported(name, dtype)
    result = apply_rules(fn, [rule])
    assert found, f"{result.near_miss}\n{fn.graph}"
    outputs = fn.outputs["logits"]
    assert any(match.root is outputs for match in found)
    for size, value in CONCRETE.items():
        if size in str(inputs.values()) and name not in BOUND:
            assert found[0].size(size) == value


def test_the_table_serves_export() -> None:
    """What stays whole in `decompositions` does so in torch.export."""

    class Module(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return F.silu(F.layer_norm(F.linear(x, w), (4,))).transpose(0, 1).sum()

    program = torch.export.export(Module(), (torch.ones(3, 4), torch.ones(4, 4)), strict=False)
    graph = program.run_decompositions(decompositions()).graph
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert names[:3] == ["aten.linear.default", "aten.layer_norm.default", "aten.silu.default"]
    assert "aten.permute.default" in names


def test_sizes_become_expressions() -> None:
    def code(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x[..., half:].reshape(x.shape[0] * x.shape[1], 3, half // 3)

    graph = trace_pattern(code, {"x": "F[B,T,6*R]"}, torch.float32).graph
    slice_, reshape = (n for n in graph.nodes if n.op == "call_function")
    assert slice_.args[2] == Sym("3*R")
    assert list(reshape.args[1]) == [Sym("B*T"), 3, Sym("R")]


@pytest.mark.parametrize(
    ("code", "inputs", "message"),
    [
        (lambda x: x + torch.tensor([1.0]), {"x": "F[T]"}, "makes a constant tensor"),
        (lambda x, y: x + 1, {"x": "F[T]", "y": "F[T]"}, r"does not use \['y'\]"),
        (lambda x, eps: x + 1, {"x": "F[T]", "eps": "float"}, r"does not use \['eps'\]"),
        (lambda x: x, {"x": "F[T]"}, "computes nothing"),
        (lambda x: (x + 1, x * 2), {"x": "F[T]"}, "returns a tuple, not a tensor"),
        (lambda x: x.expand(x.shape[0] * 2, *x.shape), {"x": "F[...,H]"}, "behind"),
        (lambda x: x + 1, {"x": "F[T"}, "not a tensor type"),
        (lambda x: x @ x, {"x": "F[T,H]"}, r"cannot be traced with \(f32\["),
    ],
)
def test_unusable_patterns(code: Callable[..., Any], inputs: dict[str, str], message: str) -> None:
    with pytest.raises(GraftworkError, match=message):
        trace_pattern(code, inputs, torch.float32)


SAME = [
    ((A.view.default, [Sym("B") * Sym("T"), 8]), (A.reshape.default, [Sym("T") * Sym("B"), -1])),
    ((A.transpose.int, 1, 2), (A.permute.default, [0, 2, 1])),
    ((A.transpose.int, -1, -2), (A.permute.default, [0, -1, 1])),
    ((A.slice.Tensor, 2, 0, 8), (A.slice.Tensor, -1)),
    ((A.slice.Tensor, 2, 4, 8), (A.slice.Tensor, -1, -4, 2**63 - 1)),
    ((A.mean.dim, [2]), (A.mean.dim, [-1], False)),
    ((A.softmax.int, 2), (A._softmax.default, -1, False)),
    ((A.unsqueeze.default, 3), (A.unsqueeze.default, -1)),
    ((A.add.Tensor, 1), (A.add.Tensor, 1)),
    ((A.expand.default, [-1, -1, 8]), (A.expand.default, [Sym("B"), Sym("T"), 8])),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=[str(one[0]) for one, _ in SAME])
def test_spellings_have_one_normal_form(one: Any, other: Any) -> None:
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[B,T,8]"))
    first, second = (fn.call(call[0], x, *call[1:]) for call in (one, other))
    assert type_of(first) == type_of(second)
    assert normal_call(first) == normal_call(second)


def test_different_calls_have_different_normal_forms() -> None:
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[B,8,8]"))
    calls = [
        (A.transpose.int, 1, 2), (A.transpose.int, 0, 1), (A.permute.default, [1, 2, 0]),
        (A.slice.Tensor, 2, 0, 4), (A.slice.Tensor, 2, 4), (A.slice.Tensor, 1, 0, 4),
        (A.mean.dim, [1]), (A.mean.dim, [2]), (A._softmax.default, 1, False),
        (A._softmax.default, 2, False), (A.unsqueeze.default, 2), (A.unsqueeze.default, 3),
        (A.reshape.default, [Sym("B"), 64]), (A.reshape.default, [Sym("B"), 4, 16]),
    ]  # fmt: skip
    forms = [normal_call(fn.call(target, x, *args)) for target, *args in calls]
    assert all(a != b for i, a in enumerate(forms) for b in forms[:i])
