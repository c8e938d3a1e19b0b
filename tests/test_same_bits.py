"""A token has the same bits in steps of every width, in a chain and in a tree, on both backends.

Activations in 8 bits make a step of a last bit, so weights of few bits depend on it: sizes are
those of real models, and what is compared is the residual stream at every point.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as oir
import onnxruntime
import pytest
import torch
from handmade import Shape, cached_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import one_in
from tiny import in_int8

from graftwork.backends import Target, compile
from graftwork.backends.onnxruntime.routing import Router
from graftwork.backends.torch import cpu
from graftwork.ir import Program
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.caching.quantize_old_rows import QuantizeOldRows
from graftwork.passes.caching.read_chunks import ReadChunks
from graftwork.passes.caching.read_sparse import ReadSparse
from graftwork.passes.caching.share_prefix import SharePrefix
from graftwork.passes.engine.base import Pass
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm
from graftwork.passes.numerics.quantize_weights import QuantizeWeights

G = torch.ops.graftwork
PAST, MOST, BLOCK = 37, 32, 64
"""Tokens before the compared ones, those of the compared text, and of a piece of a prompt."""
FLOAT = oir.DataType.FLOAT

LLAMA: dict[str, Any] = {"layers": 1, "vocab": 90, "context": 128}
SHAPES = {
    "smollm2": Shape(heads=9, groups=3, dim=64, inner=1536, **LLAMA),
    "gemma3": Shape(
        heads=4,
        groups=1,
        dim=256,
        inner=2048,
        qk_norm=True,
        window=40,
        activation="gelu_tanh",
        **LLAMA,
    ),
    "phi": Shape(
        heads=5,
        groups=5,
        dim=80,
        inner=1000,
        rotary=32,
        layer_norm=True,
        bias=True,
        activation="gelu",
        **LLAMA,
    ),
    "head of 96": Shape(heads=4, groups=4, dim=96, inner=778, **LLAMA),
    "head of 128": Shape(heads=7, groups=1, dim=128, inner=1490, bias=True, **LLAMA),
    "nothing even": Shape(heads=5, groups=5, dim=14, inner=102, softcap=20.0, sinks=True, **LLAMA),
    "alibi": Shape(heads=6, groups=2, dim=20, inner=102, rotary=0, slopes=True, **LLAMA),
}
FEW_BITS = {
    "int8": in_int8(),
    "int4": QuantizeWeights(bits=4, group=32, embedding=True),
    "float head": QuantizeWeights(bits=8, group=0, symmetric=True),
}


ROWS = {"residual": 64, "block": 64}
CACHES: dict[str, tuple[Pass, ...]] = {
    "kivi": (QuantizeOldRows(**ROWS),),
    "rotatekv": (QuantizeOldRows(bits=3, keys="row", turned=True, unrotated=True, **ROWS),),
    "gear": (QuantizeOldRows(bits=2, outliers=1, rank=2, **ROWS),),
    "labels": (ReadSparse(pick="labels", rows=16),),
    "chunks": (ReadChunks(rows=16),),
    "attention of a layer": (ReadSparse(rows=16, picks=1, full=1),),
    "a shared beginning": (SharePrefix(),),
    "8 bits": (QuantizeCache(bits=8),),
}
"""Passes that change how rows are held and read."""


def program_of(shape: Shape, bits: str, passes: Sequence[Pass] = ()) -> Program:
    """A step of few bits as recipes make it, which also returns the residual stream."""
    program = cached_llama(shape)
    for each in (*passes, FuseResidualNorm()):
        program = each.run(program).program
    step = program.function("step").copy()
    points = {f"after.{n.kwargs['point']}": n for n in step.calls(G.hidden.default)}
    step.set_outputs({**step.outputs, **points})
    return (
        FEW_BITS[bits].run(program.replace(functions={**program.functions, "step": step})).program
    )


class Steps:
    """Runs steps behind one prompt of `past` tokens; what comes out for each token."""

    def __init__(self, program: Program, target: Target, past: int = PAST) -> None:
        self.executable, self.past = compile(program, target), past
        self.names = [n for n in program.step.outputs if n == "logits" or n.startswith("after")]
        self.prompt = torch.arange(past)[None] * 7 % 90

    def begin(self, batch: int = 1) -> None:
        self.executable.begin(batch, self.past + 2 * MOST)
        self.executable.reserve(self.past + 2 * MOST)
        for begin in range(0, self.past, BLOCK):
            self.run(self.prompt[:, begin : begin + BLOCK].expand(batch, -1), begin)
        for name in ("store", "mark"):
            if name in self.executable.program.functions:
                self.executable.run(name, {"past": torch.full((batch,), self.past)}, ())

    def run(
        self, tokens: torch.Tensor, past: int, parents: list[int] | None = None
    ) -> list[list[torch.Tensor]]:
        """Outputs of each column, of a tree if `parents` are given, otherwise of a chain."""
        batch, width = tokens.shape
        seen = torch.eye(width, dtype=torch.bool)
        for column, parent in enumerate(range(-1, width - 1) if parents is None else parents):
            if parent >= 0:
                seen[column] |= seen[parent]
        inputs = {
            "tokens": tokens.contiguous(),
            "positions": (past + seen.sum(-1) - 1).expand(batch, width).contiguous(),
            "past": torch.full((batch,), past),
            "select": torch.arange(width).expand(batch, width).contiguous(),
            "ancestors": seen.expand(batch, width, width).contiguous(),
        }
        if width == 1:
            del inputs["ancestors"]
        found = self.executable.run("step", inputs, self.names)
        return [[found[n][-1, c].clone() for n in self.names] for c in range(width)]


def differing(steps: Steps, widths: tuple[int, ...]) -> list[str]:
    """Where tokens of a text have other bits than one by one: in chains, trees and batches."""
    text, wrong = torch.arange(MOST)[None] * 11 % 89, []
    steps.begin()
    past = steps.past
    alone = [steps.run(text[:, i : i + 1], past + i)[0] for i in range(MOST)]

    def compare(what: str, got: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> None:
        for token, (one, other) in enumerate(zip(got, wanted, strict=True)):
            pairs = zip(steps.names, one, other, strict=True)
            names = [name for name, a, b in pairs if not torch.equal(a, b)]
            wrong.extend(f"{what}, token {token}: {name}" for name in names)

    for width in widths:
        chosen = random.Random(width)
        steps.begin()
        count = min(width, MOST)
        compare(f"chain of {width}", steps.run(text[:, :count], past), alone[:count])
        # The text as one path of a tree, among other nodes.
        path = [0, *sorted(chosen.sample(range(1, width), count // 2))]
        parents = [chosen.randrange(max(column, 1)) if column else -1 for column in range(width)]
        tokens = torch.tensor([chosen.choices(range(90), k=width)])
        for depth, column in enumerate(path):
            tokens[0, column] = text[0, depth]
            parents[column] = path[depth - 1] if depth else -1
        steps.begin()
        got = steps.run(tokens, past, parents)
        compare(f"tree of {width}", [got[column] for column in path], alone[: len(path)])
    steps.begin(batch=9)
    rows = torch.cat([text.flip(1)[:, :8].expand(8, 8), text[:, :8]])
    compare("batch of 9", steps.run(rows, past), alone[:8])
    return wrong


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *one_in(3, [(name, "int8") for name in SHAPES]),
        ("smollm2", "int4"),
        pytest.param("phi", "float head", marks=pytest.mark.long),
    ],
)
def test_steps_on_onnxruntime(name: str, bits: str) -> None:
    steps = Steps(program_of(SHAPES[name], bits), Target(threads=2))
    assert not differing(steps, (2, 3, 5, 8, 13, 17, 31, 33, 48, 64))


@pytest.mark.parametrize("name", one_in(3, CACHES))
def test_steps_over_caches_on_onnxruntime(name: str) -> None:
    """A lone token runs once through all layers: graftwork's own kernels read the cache."""
    shape = replace(SHAPES["smollm2"], layers=2 + (name == "attention of a layer"), context=512)
    program = program_of(shape, "int8", CACHES[name])
    router = Router(program, program.step, Target())
    assert router.own and router.pairs and not router.widens
    assert not differing(Steps(program, Target(threads=2), 2 * BLOCK), (2, 3, 5, 8, 17, 33, 48))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 60, 100, 128, 576, 2048])
def test_softmax_and_sums_of_a_row_are_alike_in_any_company(size: int) -> None:
    """Of kernels that are ONNX Runtime's own."""
    for op in ("Softmax", "LogSoftmax", "ReduceSum"):
        run = row_op(op)
        rows = torch.randn(4, 7, size, generator=torch.Generator().manual_seed(size)).numpy()
        whole = run(rows)
        for b, t in itertools.product(range(4), range(7)):
            one = run(rows[b : b + 1, t : t + 1].copy())
            assert (one[0, 0] == whole[b, t]).all(), (op, b, t)


def row_op(op: str) -> Callable[[Any], Any]:
    """An op of ONNX over the last axis, run by ONNX Runtime."""
    x = oir.Value(name="x", shape=oir.Shape(["b", "t", "d"]), type=oir.TensorType(FLOAT))
    axes = oir.Value(name="axes", const_value=oir.tensor([-1], name="axes"))
    given = [x, axes] if op == "ReduceSum" else [x]
    node = oir.node(op, given, {} if op == "ReduceSum" else {"axis": -1})
    node.outputs[0].name = "y"
    node.outputs[0].type = oir.TensorType(FLOAT)
    opsets = {"": 18}
    stored = [axes] if op == "ReduceSum" else []
    graph = oir.Graph([x], node.outputs, nodes=[node], initializers=stored, opset_imports=opsets)
    model = oir.serde.serialize_model(oir.Model(graph, ir_version=9)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return lambda rows: session.run(None, {"x": rows})[0]


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param("smollm2", "float head", marks=pytest.mark.long),
        *(pytest.param(name, "int8", marks=pytest.mark.long) for name in SHAPES),
    ],
)
def test_steps_on_torch(name: str, bits: str) -> None:
    steps = Steps(program_of(SHAPES[name], bits), Target("torch", threads=2))
    assert not differing(steps, (2, 3, 5, 8, 13, 17, 31, 33, 48, 64))


@pytest.mark.parametrize("columns", [576, 70])
def test_float_products_beside_few_bits_are_alike_in_steps_of_every_width(columns: int) -> None:
    """For many rows there is a faster order, which such steps do not take."""
    x, weight = torch.randn(1, 150, columns), torch.randn(53, columns)
    whole = cpu.linear_alike(x, weight)
    for width in (1, 2, 7, 8, 63, 64, 65, 100):
        assert torch.equal(cpu.linear_alike(x[:, :width], weight), whole[:, :width])
    assert not torch.equal(cpu.linear(x, weight), whole)  # what it is for


@pytest.mark.parametrize("experts", [4, 60])
def test_a_router_weighs_a_token_alike_in_any_company(experts: int) -> None:
    """Also where experts are no multiple of a vector."""
    weigh = torch.compile(lambda x: cpu.ALIKE_ROWS[torch.ops.aten._softmax.default](x, -1, False))
    x = torch.randn(3, experts)
    assert torch.equal(weigh(x)[1:2], weigh(x[1:2].clone()))
    assert torch.allclose(weigh(x), x.softmax(-1))


def rows_apart(places: list[int], rows: torch.Tensor, count: int) -> torch.Tensor:
    """Rows [B,G,n,...] at these places of `count` rows, of which the others hold something else."""
    apart = torch.ones_like(rows[:, :, :1]).repeat_interleave(count, 2)
    apart[:, :, places] = rows
    return apart


SIZES = st.tuples(
    st.integers(0, 99),
    st.sampled_from(((9, 3), (4, 1), (5, 5), (7, 1))),
    st.sampled_from((64, 80, 96, 128, 256)),
    st.integers(1, 90),
)


@given(SIZES)
@settings(max_examples=12)
def test_attention_depends_on_the_rows_that_are_seen_and_not_on_where_they_lie(sizes: Any) -> None:
    """A tree's nodes lie between others; in the cache of a chain, side by side."""
    seed, (heads, groups), dim, seen = sizes
    chosen, random_ = random.Random(seed), torch.Generator().manual_seed(seed)
    places = sorted(chosen.sample(range(seen + 40), seen))
    mask = torch.zeros(1, 1, 1, seen + 40, dtype=torch.bool)
    mask[..., places] = True
    whole = torch.ones(1, 1, 1, seen, dtype=torch.bool)
    q = torch.randn(1, heads, 1, dim, generator=random_)
    k, v = (torch.randn(1, groups, seen, dim, generator=random_) for _ in range(2))
    k_apart, v_apart = (rows_apart(places, x, seen + 40) for x in (k, v))
    sinks = torch.randn(heads, generator=random_) if seed % 2 else None
    how = {"scale": dim**-0.5, "softcap": 5.0 if seed % 3 else None}
    alone = cpu.OWN["attend"](q, k, v, whole, None, sinks, **how)
    assert torch.equal(cpu.OWN["attend"](q, k_apart, v_apart, mask, None, sinks, **how), alone)
    parts = [
        cpu.OWN["attend_part"](q, *rows, seen_, None, sinks, **how)
        for rows, seen_ in (((k, v), whole), ((k_apart, v_apart), mask))
    ]
    assert all(map(torch.equal, *parts))
    for bits in (4, 8):
        stored = [cpu.OWN["quantize_rows"](x, bits=bits, turned=False) for x in (k, v)]
        flat = [part for pair in stored for part in pair]
        apart = [rows_apart(places, part, seen + 40) for part in flat]
        few = {**how, "bits": bits, "turned": False}
        alone = cpu.OWN["attend_quantized"](q, *flat, whole, None, sinks, **few)
        assert torch.equal(cpu.OWN["attend_quantized"](q, *apart, mask, None, sinks, **few), alone)
