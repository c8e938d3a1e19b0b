"""Lowering for ONNX Runtime: same values in the interpreter, the expected kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
import torch
from handmade import Shape, cached_llama
from selection import one_in

from graftwork.backends.onnxruntime.decompose import decompose
from graftwork.backends.onnxruntime.lower import Variant, lower
from graftwork.backends.onnxruntime.norms import fuse_norms
from graftwork.backends.onnxruntime.views import simplify_views
from graftwork.ir import Function, Program, Sym, TensorType, Weight, run
from graftwork.ir.check.verify import verify
from graftwork.ir.inference.infer import _infer, _shapes
from graftwork.ir.support.errors import VerifyError
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.hold_windows import HoldWindows
from graftwork.passes.caching.read_sparse import ReadSparse
from graftwork.passes.caching.split_heads import SplitHeads
from graftwork.passes.engine.validate import empty_states

A = torch.ops.aten
G = torch.ops.graftwork

KERNEL = [
    Shape(),
    Shape(interleaved=True),
    Shape(rotary=0),
    Shape(dim=32, rotary=16),
    Shape(dim=24),  # too narrow to rotate in the kernel
    Shape(window=3),
    Shape(softcap=3.0),
    Shape(sinks=True),
    Shape(slopes=True, rotary=0),
    Shape(slopes=True, sinks=True, window=3),
    Shape(qk_norm=True),
    Shape(bias=True, tied=True, layer_norm=True, activation="gelu"),
    Shape(heads=3, groups=3, activation="relu"),
]
PLAIN = [
    Shape(dim=12),
    Shape(value_dim=24),
    Shape(dim=12, sinks=True, softcap=2.0),
    Shape(chunk=3),
    Shape(chunk=5, window=4, slopes=True),
]
"""Shapes that GroupQueryAttention refuses."""

TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)


def name_of(shape: Shape) -> str:
    """What is special about a shape."""
    default = Shape()
    return "-".join(f"{k}={v}" for k, v in vars(shape).items() if v != vars(default)[k]) or "plain"


def step_inputs(batch: int, variant: str, past: list[int]) -> dict[str, torch.Tensor]:
    """Inputs of a step of 4 tokens; a tree unless it is a chain."""
    lengths = torch.tensor(past)
    depth = torch.arange(4) if variant == "chain" else torch.tensor([0, 1, 1, 2])
    tree = torch.ones(4, 4, dtype=torch.bool).tril() if variant == "chain" else TREE
    return {
        "tokens": torch.arange(batch * 4).reshape(batch, 4) * 7 % 61,
        "positions": lengths[:, None] + depth,
        "past": lengths,
        "ancestors": tree.expand(batch, 4, 4),
        "select": torch.tensor([[3, 1]]).expand(batch, 2),
        "seqlens": (lengths + 3).to(torch.int32),
        "total": torch.tensor(max(past) + 4, dtype=torch.int32),
    }


def filled_states(program: Program, batch: int, rows: int) -> dict[str, torch.Tensor]:
    """Random cache contents."""
    torch.manual_seed(3)
    return {name: torch.randn_like(t) for name, t in empty_states(program, batch, rows).items()}


def only_needed(program: Program, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that the step takes."""
    return {str(n.target): inputs[str(n.target)] for n in program.function("step").inputs}


@pytest.mark.parametrize("variant", get_args(Variant))
@pytest.mark.parametrize("shape", one_in(2, KERNEL + PLAIN), ids=name_of)
def test_lowered_program_means_the_same(shape: Shape, variant: Variant) -> None:
    program = cached_llama(shape)
    lowered = lower(program, "step", variant, native=variant == "own")
    verify(lowered)
    batch, past = (2, [5, 2]) if variant in ("batch", "own") else (1, [5])
    inputs = step_inputs(batch, variant, past) | filled_states(program, batch, 12)
    want = run(program, "step", only_needed(program, inputs))
    got = run(lowered, "step", only_needed(lowered, inputs))
    assert want.keys() == got.keys()
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", KERNEL, ids=name_of)
def test_every_attention_becomes_one_kernel(shape: Shape) -> None:
    for variant in ("chain", "tree"):
        step = lower(cached_llama(shape), "step", variant).function("step")
        assert len(step.calls(G.ort_gqa.default)) == shape.layers
        assert not step.calls(G.attend.default, G.cache_write.default, G.step_mask.default)


@pytest.mark.parametrize("shape", KERNEL + PLAIN, ids=name_of)
def test_every_attention_becomes_one_kernel_of_our_own(shape: Shape) -> None:
    step = lower(cached_llama(shape), "step", "own", native=True).function("step")
    assert len(step.calls(G.ort_attend.default)) == shape.layers
    assert not step.calls(G.attend.default, G.cache_write.default, G.step_mask.default)


@pytest.mark.parametrize("shape", [Shape(), Shape(rotary=0)], ids=name_of)
def test_the_kernel_keeps_queries_that_a_state_holds(shape: Shape) -> None:
    program = EvictCache(method="h2o", budget=32, block=16).run(cached_llama(shape)).program
    step = lower(program, "step", "own", native=True).function("step")
    assert len(step.calls(G.ort_attend_keeping.default)) == shape.layers
    assert not step.calls(G.attend.default, G.cache_write.default, G.rotary.default)


def means_the_same(program: Program, rows: int) -> Function:
    """The lowered step, which has the program's outputs; states of all classes have `rows`."""
    torch.manual_seed(3)
    states = {}
    for name, state in program.states.items():
        type = state.type.bind({"B": 2} | {symbol: rows for symbol in ("C", "C.1", "C.2")})
        floats = type.dtype.is_floating_point
        random = torch.randn(type.shape) if floats else torch.randint(200, type.shape)
        states[name] = random.to(type.dtype)
    lowered = lower(program, "step", "own", native=True)
    inputs = step_inputs(2, "own", [5, 2]) | states
    want = run(program, "step", only_needed(program, inputs))
    got = run(lowered, "step", only_needed(lowered, inputs))
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=1e-4)
    return lowered.function("step")


@pytest.mark.parametrize("shape", [Shape(), Shape(rotary=0), Shape(qk_norm=True)], ids=name_of)
def test_caches_of_single_heads_stay_in_the_kernel(shape: Shape) -> None:
    program = SplitHeads().run(cached_llama(shape)).program
    step = means_the_same(program, 12)
    assert len(step.calls(G.ort_attend.default)) == shape.layers * shape.groups
    assert not step.calls(G.attend.default, G.cache_write.default, G.rotary.default)
    assert not step.calls(A.transpose.int) or shape.qk_norm


@pytest.mark.parametrize("shape", [Shape(), Shape(rotary=0)], ids=name_of)
def test_caches_of_heads_of_queries_stay_in_the_kernel(shape: Shape) -> None:
    options = {"method": "snapkv", "heads": "own", "budget": 32, "block": 16, "recent": 8}
    program = EvictCache(**options).run(cached_llama(shape)).program
    step = means_the_same(program, 48)
    (call, *others) = step.calls(G.ort_attend_keeping.default)
    assert len(others) == shape.layers - 1
    assert call.kwargs["repeat"] == shape.heads // shape.groups
    assert not step.calls(G.attend.default, G.cache_write.default, G.rotary.default)


def test_windows_of_the_latest_rows_stay_in_the_kernel() -> None:
    shape = Shape(window=3)
    program = HoldWindows(block=8).run(cached_llama(shape)).program
    step = means_the_same(program, 16)
    calls = step.calls(G.ort_attend.default)
    assert len(calls) == shape.layers and all(call.kwargs["latest"] for call in calls)
    assert not step.calls(G.attend.default, G.rotary.default)


@pytest.mark.parametrize("shape", [Shape(), Shape(qk_norm=True)], ids=name_of)
def test_rows_for_other_attentions_are_put_by_one_kernel(shape: Shape) -> None:
    program = ReadSparse(pick="labels", rows=8, channels=8).run(cached_llama(shape)).program
    step = means_the_same(program, 12)
    assert len(step.calls(G.ort_put_rows.default)) == shape.layers
    assert not step.calls(G.rotary.default)


@pytest.mark.parametrize("shape", PLAIN, ids=name_of)
def test_what_the_kernel_refuses_stays_apart(shape: Shape) -> None:
    step = lower(cached_llama(shape), "step").function("step")
    assert not step.calls(G.ort_gqa.default)
    assert len(step.calls(G.cache_write.default)) == 2 * shape.layers


def test_a_layer_is_eight_nodes() -> None:
    sizes = []
    for layers in (1, 2):
        step = lower(cached_llama(Shape(layers=layers)), "step").function("step")
        sizes.append(Counter(str(node.target).removesuffix(".default") for node in step.calls()))
    layer = sizes[1] - sizes[0]
    del layer["<built-in function getitem>"]
    assert layer == Counter(
        {
            "aten.linear": 4,
            "aten.split_with_sizes": 1,
            "graftwork.glu": 1,
            "graftwork.ort_gqa": 1,
            "graftwork.add_rms_norm": 2,
        }
    )


def test_packed_query_key_value() -> None:
    step = lower(cached_llama(), "step").function("step")
    for node in step.calls(G.ort_gqa.default):
        assert node.args[1] is None and node.args[2] is None
        assert node.args[0].target is A.linear.default  # type: ignore[union-attr]
    normed = lower(cached_llama(Shape(qk_norm=True)), "step").function("step")
    assert all(n.args[1] is not None for n in normed.calls(G.ort_gqa.default))


def test_rotary_tables_reach_past_the_context() -> None:
    program = cached_llama()
    lowered = lower(program, "step")
    table = lowered.weights["cos.float32"]
    assert table.type.shape[0] > program.info.context
    assert torch.equal(table.load()[: program.info.context], program.weights["cos"].load())


def small(*inputs: str) -> tuple[Function, list[torch.fx.Node]]:
    """A function with inputs a, b, ... of these types."""
    fn = Function("f")
    return fn, [fn.add_input("abcdef"[i], TensorType.parse(t)) for i, t in enumerate(inputs)]


def test_views_that_cancel_go() -> None:
    fn, (a,) = small("f32[B,T,32]")
    x = fn.call(A.view.default, a, [Sym("B"), Sym("T"), 4, 8])
    x = fn.call(A.transpose.int, x, 1, 2)
    x = fn.call(A.permute.default, x, [0, 2, 1, 3])
    x = fn.call(A.clone.default, x)
    x = fn.call(A.view.default, x, [Sym("B"), Sym("T"), 32])
    fn.set_outputs({"y": x})
    simplify_views(fn)
    assert fn.outputs["y"] is a and not fn.calls()


def test_views_that_move_something_stay() -> None:
    fn, (a,) = small("f32[B,T,4,4]")
    x = fn.call(A.permute.default, fn.call(A.permute.default, a, [0, 2, 1, 3]), [0, 1, 3, 2])
    y = fn.call(A._to_copy.default, a, dtype=torch.int64)
    z = fn.call(A.expand.default, fn.call(A.unsqueeze.default, a, 0), [2, -1, -1, -1, -1])
    fn.set_outputs({"x": x, "y": y, "z": z})
    assert simplify_views(fn) == 0


def test_one_sum_feeds_one_fused_norm() -> None:
    fn, (a, b) = small("f32[B,T,8]", "f32[B,T,8]")
    weight = fn.weight(Weight.of("w", torch.ones(8)))
    total = fn.call(A.add.Tensor, a, b)
    norms = [fn.call(G.rms_norm.default, total, weight, eps=1e-6) for _ in range(2)]
    fn.set_outputs({"x": norms[0], "y": norms[1], "sum": total})
    assert fuse_norms(fn) == 1
    fused = fn.calls(G.add_rms_norm.default)
    assert len(fused) == 1 and len(fn.calls(G.rms_norm.default)) == 1
    assert fn.outputs["sum"].args == (fused[0], 1)


def test_rows_of_a_sum_keep_its_kernel_where_others_are_exchanged() -> None:
    """The kernels of a norm and of a sum's norm round differently, which 8 bits enlarge."""
    fn, (a, b, c) = small("f32[B,T,8]", "f32[B,T,8]", "f32[B,T,8]")
    weight = fn.weight(Weight.of("w", torch.ones(8)))
    here = fn.call(A.gt.Scalar, c, 0)
    rows = [fn.call(A.where.self, here, c, x) for x in (fn.call(A.add.Tensor, a, b), a)]
    normed = [fn.call(G.rms_norm.default, x, weight, eps=1e-6) for x in rows]
    fn.set_outputs({"x": normed[0], "y": normed[1]})
    assert fuse_norms(fn) == 1
    (fused,) = fn.calls(G.add_rms_norm.default)
    assert fn.outputs["x"].args == (fused, 0) and fused.args[0] is rows[0]


def test_scaled_or_broadcast_sums_are_left_alone() -> None:
    fn, (a, b, row) = small("f32[B,T,8]", "f32[B,T,8]", "f32[8]")
    weight = fn.weight(Weight.of("w", torch.ones(8)))
    sums = [fn.call(A.add.Tensor, a, b, alpha=2), fn.call(A.add.Tensor, a, row)]
    normed = [fn.call(G.rms_norm.default, s, weight, eps=1e-6) for s in sums]
    fn.set_outputs({"x": normed[0], "y": normed[1]})
    assert fuse_norms(fn) == 0


def test_a_cache_that_is_read_twice_keeps_its_ops() -> None:
    program = cached_llama(Shape(layers=1))
    fn = program.function("step").copy()
    before = fn.input("kv.0.key")
    with fn.graph.inserting_before(fn.output_node):
        peek = fn.call(A.neg.default, before)
    fn.set_outputs({**fn.outputs, "peek": peek})
    step = lower(program.with_function(fn), "step").function("step")
    assert not step.calls(G.ort_gqa.default)


def test_lowering_leaves_the_program_alone() -> None:
    program = cached_llama()
    before = str(program)
    lower(program, "step", "tree")
    assert str(program) == before
    assert replace(program, name="x").name == "x"


def keeping() -> tuple[Function, torch.fx.Node]:
    """A function that keeps rows of a cache, and scores with as many rows as there are."""
    fn = Function("settle")
    scores = fn.add_input("scores", TensorType(torch.float32, (Sym("B"), 2, Sym("C"))))
    past = fn.add_input("past", TensorType(torch.int64, (Sym("B"),)))
    kept = fn.call(G.keep_top.default, scores, past, rows=40, full=48, sinks=2, recent=8)
    fn.set_outputs({"kept": kept})
    return fn, scores


def test_what_an_op_asks_of_sizes_is_granted_to_its_steps_alone() -> None:
    """`keep_top` asks for C >= rows: its steps may pick 40 rows, whatever was lowered before."""
    for _ in range(2):
        fn, scores = keeping()
        assert decompose(fn, native=False) > 0
        assert fn.calls(A.topk.default) and fn.retype() == []
        with fn.graph.inserting_after(scores), pytest.raises(VerifyError, match="C >= 40"):
            fn.call(A.topk.default, scores, 40)
        # Another op forgets what is known of sizes; what was traced before stays.
        _shapes.cache_clear()
        _infer.cache_clear()
