"""Every row of the ONNX Runtime backend against what its op means in torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import symbols_of
from onnxruntime_helpers import call_in_session, function_of, run_session
from torch.utils._pytree import tree_leaves

from graftwork.backends.onnxruntime.decompose import decompose
from graftwork.backends.onnxruntime.emit import emit, targets_with_rows
from graftwork.ir import Function, Sym, TensorType, UnsupportedError, Weight, WeightStore
from graftwork.ir.ops import all_ops

A = torch.ops.aten
G = torch.ops.graftwork
F32, I64, BOOL = torch.float32, torch.int64, torch.bool

# Sizes 2 and 3 stand for nothing but themselves; 5 and 7 become the symbols B and T.
SYMBOLS = {5: "B", 7: "T"}


def x(*dims: int) -> torch.Tensor:
    """Normal values."""
    return torch.randn(dims)


def p(*dims: int) -> torch.Tensor:
    """Values between 0.1 and 1.1."""
    return torch.rand(dims) + 0.1


def n(*dims: int, high: int = 9) -> torch.Tensor:
    """Integers from 0 to high - 1."""
    return torch.randint(0, high, dims)


def b(*dims: int) -> torch.Tensor:
    """Booleans."""
    return torch.rand(dims) < 0.5


UNARY_FLOAT = [
    *("neg", "abs", "exp", "sin", "cos", "tan", "tanh", "sigmoid", "relu", "erf"),
    *("floor", "ceil", "round", "sign", "silu", "square", "expm1"),
]
UNARY_POSITIVE = ["log", "sqrt", "rsqrt", "reciprocal", "log1p"]
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum"]
COMPARE = ["eq", "ne", "lt", "le", "gt", "ge"]

T, B = Sym("T"), Sym("B")


def calls() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """(op, args, kwargs); every ATen op with a row appears."""
    for name in UNARY_FLOAT:
        yield getattr(A, name).default, (x(5, 3),), {}
    for name in UNARY_POSITIVE:
        yield getattr(A, name).default, (p(5, 3),), {}
    yield A.sin.default, (n(4),), {}
    yield A.logical_not.default, (x(3).round(),), {}
    yield A.bitwise_not.default, (b(3),), {}
    odd = torch.tensor([1.0, float("nan"), float("inf")])
    yield A.isnan.default, (odd,), {}
    yield A.isinf.default, (odd,), {}
    yield A.gelu.default, (x(5, 3),), {}
    yield A.gelu.default, (x(5, 3),), {"approximate": "tanh"}
    yield A.softplus.default, (x(9) * 20,), {}
    yield A.softplus.default, (x(9), 2.0, 1.0), {}
    yield A.leaky_relu.default, (x(9), 0.2), {}
    yield A.elu.default, (x(9),), {}
    yield A.elu.default, (x(9), 0.5, 2.0, 1.5), {}
    yield A.hardtanh.default, (x(9), -0.5, 0.7), {}
    for name in BINARY:
        op = getattr(A, name)
        op = op.Tensor if "Tensor" in op.overloads() else op.default
        yield op, (x(5, 3), p(3)), {}
        yield op, (x(5, 3), n(3) + 1), {}
    yield A.add.Tensor, (x(5), x(5)), {"alpha": 2.5}
    yield A.add.Tensor, (b(4), b(4)), {}
    yield A.add.Tensor, (n(3), T), {}
    yield A.add.Tensor, (x(7), T), {}
    yield A.sub.Tensor, (n(3), 2), {"alpha": 3}
    yield A.mul.Tensor, (b(4), b(4)), {}
    yield A.mul.Tensor, (n(4), 0.5), {}
    yield A.add.Scalar, (n(3), 2), {}
    yield A.sub.Scalar, (x(3), 2), {}
    yield A.mul.Scalar, (x(3), 2), {}
    yield A.div.Scalar, (n(3), 4), {}
    yield A.rsub.Scalar, (x(3), 2), {}
    yield A.rsub.Tensor, (x(3), x(3)), {}
    for mode in ("floor", "trunc"):
        yield A.div.Tensor_mode, (x(9) * 5, p(9)), {"rounding_mode": mode}
        yield A.div.Tensor_mode, (n(9) - 4, 3), {"rounding_mode": mode}
        yield A.div.Scalar_mode, (n(9) - 4, -3), {"rounding_mode": mode}
    yield A.floor_divide.default, (n(9), n(9) + 1), {}
    yield A.remainder.Scalar, (x(9) * 5, 1.5), {}
    yield A.remainder.Scalar, (n(9) - 4, 3), {}
    yield A.remainder.Tensor, (n(9) - 4, n(9) - 20), {}
    for exponent in (2, 3, 0.5, -0.5, -1, 1.7):
        yield A.pow.Tensor_Scalar, (p(4), exponent), {}
    yield A.pow.Tensor_Tensor, (p(4), x(4)), {}
    yield A.pow.Scalar, (2.0, x(4)), {}
    yield A.max.other, (x(4), x(4)), {}
    yield A.min.other, (x(4), x(4)), {}
    yield A.clamp.default, (x(9), -0.5, 0.5), {}
    yield A.clamp.default, (n(9), 2), {}
    yield A.clamp.default, (n(9), 0, T - 4), {}
    yield A.clamp.Tensor, (x(9), x(9), None), {}
    yield A.clamp_min.default, (x(9), 0.1), {}
    yield A.clamp_min.Tensor, (x(9), x(9)), {}
    yield A.clamp_max.default, (x(9), 0.1), {}
    yield A.clamp_max.Tensor, (x(9), x(9)), {}
    for name in COMPARE:
        op = getattr(A, name)
        yield op.Scalar, (n(9), 4), {}
        yield op.Scalar, (n(9), 4.5), {}
        yield op.Tensor, (n(9), n(9)), {}
        yield op.Tensor, (x(9), n(9)), {}
    yield A.eq.Tensor, (b(9), b(9)), {}
    yield A.lt.Scalar, (n(9), T), {}
    for name in ("logical_and", "logical_or", "logical_xor"):
        yield getattr(A, name).default, (b(9), n(9)), {}
    for op in (A.bitwise_and, A.bitwise_or, A.bitwise_xor):
        yield op.Tensor, (b(9), b(9)), {}
        yield op.Tensor, (n(9), n(9)), {}
        yield op.Scalar, (n(9), 5), {}
    yield A.__and__.Tensor, (b(9), b(9)), {}
    yield A.__or__.Tensor, (b(9), b(9)), {}
    yield A.where.self, (b(5, 1), x(5, 3), x(3)), {}
    yield A.where.self, (b(5), b(5), b(5)), {}
    yield A.where.self, (b(5), n(5), x(5)), {}
    yield A.where.ScalarOther, (b(5), x(5), 2), {}
    yield A.where.ScalarSelf, (b(5), 2.0, x(5)), {}
    yield A.where.Scalar, (b(5), 2, 3), {}
    yield A.masked_fill.Scalar, (x(5, 3), b(5, 1), float("-inf")), {}
    yield A.masked_fill.Scalar, (b(5), b(5), True), {}
    yield A.masked_fill.Tensor, (x(5), b(5), torch.tensor(2.0)), {}
    yield A.to.dtype, (x(5), I64), {}
    yield A.to.dtype, (n(5), BOOL), {}
    yield A.to.dtype_layout, (n(5),), {"dtype": F32}
    yield A.to.device, (n(5), torch.device("cpu"), F32), {}
    yield A.to.other, (n(5), x(2)), {}
    yield A._to_copy.default, (n(5),), {"dtype": F32}
    yield A.type_as.default, (n(5), x(2)), {}
    for op in (A.clone, A.alias, A.contiguous, A.detach, A.lift_fresh_copy):
        yield op.default, (x(5),), {}
    yield A.dropout.default, (x(5), 0.3, False), {}
    yield from shape_calls()
    yield from reduction_calls()
    yield from product_calls()


def shape_calls() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Ops that move or make elements."""
    for op in (A.view, A.reshape, A._unsafe_view):
        yield op.default, (x(5, 7, 6), [B, T, 2, 3]), {}
    yield A.view.default, (x(5, 7, 6), [B * T, 6]), {}
    yield A.view.default, (x(35, 6), [35 * 2, 3]), {}
    yield A.view.default, (x(5, 7, 2, 3), [T, B, 6]), {}
    yield A.flatten.using_ints, (x(5, 7, 2, 3), 2, 3), {}
    yield A.unflatten.int, (x(5, 6), 1, [2, 3]), {}
    yield A.view_as.default, (x(6), x(2, 3)), {}
    yield A.unsqueeze.default, (x(5, 3), -1), {}
    yield A.squeeze.dim, (x(5, 1, 3), 1), {}
    yield A.squeeze.dim, (x(5, 3), 1), {}
    yield A.squeeze.dims, (x(1, 5, 1), [0, 2]), {}
    yield A.squeeze.default, (x(1, 5, 1),), {}
    yield A.permute.default, (x(5, 7, 3), [2, 0, -2]), {}
    yield A.transpose.int, (x(5, 7, 3), -1, 1), {}
    yield A.t.default, (x(5, 3),), {}
    yield A.numpy_T.default, (x(5, 7, 3),), {}
    yield A.expand.default, (x(5, 1, 3), [-1, T, -1]), {}
    yield A.expand.default, (x(3), [B, T, 3]), {}
    yield A.expand_as.default, (x(1, 3), x(5, 3)), {}
    yield A.broadcast_to.default, (x(1, 3), [4, 3]), {}
    yield A.copy.default, (x(5, 3), n(3)), {}
    yield A.repeat.default, (x(5, 3), [2, 1, 3]), {}
    yield A.repeat_interleave.self_int, (x(5, 3), 4, 1), {}
    yield A.repeat_interleave.self_int, (x(5, 3), 2), {}
    for start, end, step in ((1, None, 1), (None, -1, 1), (0, 2**63 - 1, 1), (1, 6, 2), (-3, 8, 1)):
        yield A.slice.Tensor, (x(5, 8), 1, start, end, step), {}
    yield A.slice.Tensor, (x(5, 7), 1, 1, T), {}
    yield A.narrow.default, (x(5, 8), 1, 2, 3), {}
    yield A.select.int, (x(5, 7), 1, -1), {}
    yield A.select.int, (x(5, 7), 1, T - 2), {}
    yield A.split.Tensor, (x(5, 8), 3, 1), {}
    yield A.split_with_sizes.default, (x(5, 8), [1, 7], -1), {}
    yield A.chunk.default, (x(5, 8), 2, -1), {}
    yield A.chunk.default, (x(5, 8), 1, -1), {}
    yield A.unbind.int, (x(5, 2), 1), {}
    yield A.flip.default, (x(5, 4), [1]), {}
    yield A.cat.default, ([x(5, 2), x(5, 3)], -1), {}
    yield A.cat.default, ([x(2), n(2)],), {}
    yield A.concat.default, ([x(5, 2), x(5, 3)], -1), {}
    yield A.stack.default, ([x(5, 2), x(5, 2)], -1), {}
    yield A.constant_pad_nd.default, (x(4, 6), [1, -2, 2, 0], 0.5), {}
    yield A.embedding.default, (x(9, 3), n(5, 7)), {}
    yield A.index_select.default, (x(5, 7), 1, n(3, high=7)), {}
    yield A.gather.default, (x(5, 9), 1, n(5, 7)), {}
    yield A.scatter.src, (x(5, 9), 1, torch.randperm(9)[None, :4].expand(5, 4), x(5, 4)), {}
    yield A.scatter.value, (x(5, 9), 1, n(5, 7), 1.5), {}
    yield A.index.Tensor, (x(5, 9, 3), [None, n(4)]), {}
    yield A.index.Tensor, (x(5, 9, 3), [n(5, 1, high=5), n(7)]), {}
    yield A.index_put.default, (x(9, 3), [n(7)], x(7, 3), True), {}
    yield A.index_add.default, (x(9, 3), 0, n(7), x(7, 3)), {}
    yield A.full.default, ([B, 3], 2.5), {}
    yield A.full.default, ([], 2), {"dtype": I64}
    yield A.full_like.default, (n(5), 2.5), {"dtype": F32}
    yield A.new_full.default, (x(2), [3, 2], 7), {}
    for op in (A.zeros, A.ones):
        yield op.default, ([T, 2],), {"dtype": I64}
    for op in (A.zeros_like, A.ones_like):
        yield op.default, (x(5, 2),), {}
    for op in (A.new_zeros, A.new_ones):
        yield op.default, (x(2), [4]), {"dtype": BOOL}
    yield A.scalar_tensor.default, (2.5,), {}
    yield A.arange.default, (T,), {"dtype": I64}
    yield A.arange.start, (2, 6), {}
    yield A.arange.start_step, (1, 9, 2), {"dtype": F32}
    yield A.tril.default, (x(7, 7),), {}
    yield A.triu.default, (b(7, 7), 1), {}


def reduction_calls() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Ops that fold axes, sort and accumulate."""
    for op in (A.sum.dim_IntList, A.mean.dim):
        yield op, (x(5, 7, 3), [-1], True), {}
        yield op, (x(5, 7, 3), [0, 2]), {}
    yield A.sum.dim_IntList, (b(5, 7), [1]), {}
    yield A.sum.default, (x(5, 7),), {}
    yield A.mean.default, (x(5, 7),), {}
    for op in (A.amax, A.amin):
        yield op.default, (x(5, 7), [1], True), {}
    for op in (A.max, A.min):
        yield op.default, (x(5, 7),), {}
        yield op.dim, (x(5, 7), -1), {}
    for op in (A.argmax, A.argmin):
        yield op.default, (x(5, 7), -1), {}
        yield op.default, (x(5, 7), 0, True), {}
        yield op.default, (x(5, 7), None), {}
    for op in (A.any, A.all):
        yield op.default, (b(5, 7),), {}
        yield op.dim, (n(5, 7, high=2), 1), {}
        yield op.dims, (b(5, 7), [1], True), {}
    yield A.var.correction, (x(5, 7), [1]), {"keepdim": True}
    yield A.var.correction, (x(5, 7), [0, 1]), {"correction": 0}
    for op in (A.softmax, A.log_softmax):
        yield op.int, (x(5, 7), -1), {}
    for op in (A._softmax, A._log_softmax):
        yield op.default, (x(5, 7), 0, False), {}
    yield A.logsumexp.default, (x(5, 7), [1]), {}
    yield A.cumsum.default, (n(5, 7), 1), {}
    yield A.topk.default, (x(5, 9), 3), {}
    yield A.topk.default, (x(6, 9), 3, 0, False), {}
    yield A.sort.default, (x(5, 7), 0, True), {}
    yield A.sort.stable, (x(5, 7),), {"stable": True, "dim": 1}


def product_calls() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Products, convolutions and norms."""
    yield A.linear.default, (x(5, 7, 3), x(4, 3)), {}
    yield A.linear.default, (x(5, 7, 3), x(4, 3), x(4)), {}
    yield A.linear.default, (x(5, 3), x(3)), {}
    yield A.matmul.default, (x(5, 2, 7, 3), x(5, 2, 3, 4)), {}
    yield A.mm.default, (x(5, 3), x(3, 4)), {}
    yield A.mv.default, (x(5, 3), x(3)), {}
    yield A.bmm.default, (x(5, 7, 3), x(5, 3, 2)), {}
    yield A.addmm.default, (x(4), x(5, 3), x(3, 4)), {}
    yield A.addmm.default, (x(4), x(5, 3), x(3, 4)), {"beta": 0.5, "alpha": 2}
    yield A.baddbmm.default, (x(5, 7, 2), x(5, 7, 3), x(5, 3, 2)), {"beta": 0}
    yield A.conv1d.default, (x(2, 4, 9), x(4, 1, 3), x(4), [1], [2], [1], 4), {}
    yield A.layer_norm.default, (x(5, 7, 3), [3], p(3), x(3), 1e-4), {}
    yield A.layer_norm.default, (x(5, 6, 3), [6, 3]), {}
    yield A.rms_norm.default, (x(5, 7, 3), [3], p(3), 1e-4), {}
    yield A.rms_norm.default, (x(5, 7, 3), [3]), {}
    yield A.group_norm.default, (x(5, 4, 9), 2, p(4), x(4), 1e-4), {}
    yield A.group_norm.default, (x(5, 4, 9), 2), {}


def _seeded(make: Any) -> list[Any]:
    torch.manual_seed(0)
    return list(make())


CALLS = _seeded(calls)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Same dtype, shape and values up to float error."""
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("case", range(len(CALLS)), ids=lambda i: f"{CALLS[i][0]}-{i}")
def test_row_means_what_torch_means(case: int, tmp_path: Path) -> None:
    target, args, kwargs = CALLS[case]
    sizes = {"B": 5, "T": 7}
    concrete = torch.fx.node.map_aggregate(
        (list(args), kwargs), lambda a: a.evaluate(sizes.__getitem__) if isinstance(a, Sym) else a
    )
    want = target(*concrete[0], **concrete[1])
    wanted = list(want) if isinstance(want, (tuple, list)) else [want]
    needs = {s for a in tree_leaves((args, kwargs)) if isinstance(a, Sym) for s in a.symbols}
    fn, feeds = function_of(target, args, kwargs, SYMBOLS)
    missing = {name: size for size, name in SYMBOLS.items() if name in needs - symbols_of(fn)}
    for name, size in missing.items():
        fn.add_input(f"size_{name}", TensorType(I64, (Sym(name),)))
        feeds[f"size_{name}"] = torch.zeros(size, dtype=I64)
    assert decompose(fn) == 0, f"{target} has no row"
    got = list(run_session(fn, feeds, tmp_path).values())
    for result, expected in zip(got, wanted, strict=True):
        close(result, expected)


def test_every_aten_row_is_tested() -> None:
    tested = {target for target, _, _ in CALLS}
    rows = {t for t in targets_with_rows() if t.namespace == "aten"}
    made_of_garbage = {A.empty.memory_format, A.empty_like.default, A.new_empty.default}
    assert rows - tested == made_of_garbage


SAMPLES = [
    (name, index, sample)
    for name, definition in all_ops().items()
    for index, sample in enumerate(_seeded(definition.samples))
    if not any(
        isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16
        for leaf in tree_leaves(sample)
    )
]


@pytest.mark.parametrize(
    "case",
    [
        # The first two of each op every day, and one of experts, which take seconds each.
        pytest.param(case, id=f"{name}-{case}", marks=[pytest.mark.long] * (index >= often))
        for case, (name, index, _) in enumerate(SAMPLES)
        for often in [1 if name in ("quantized_experts", "quantized_moe") else 2]
    ],
)
def test_op_sample(case: int, tmp_path: Path) -> None:
    name, _, (args, kwargs) = SAMPLES[case]
    definition = all_ops()[name]
    want = definition.meaning(*args, **kwargs)
    wanted = list(want) if isinstance(want, tuple) else [want]
    got = call_in_session(definition.overload, args, kwargs, tmp_path)
    if name == "ort_gqa":  # rows that are not valid are not specified
        rows = int(args[5]) + 1  # seqlens of the one sequence
        got, wanted = ([a, k[:, :, :rows], v[:, :, :rows]] for a, k, v in (got, wanted))
    for result, expected in zip(got, wanted, strict=True):
        close(result, expected)


def with_weights(name: str, sample: int, inputs: int) -> tuple[Function, Any, Any, Any]:
    """(function, feeds, weights, expected) of an op sample whose later tensors are weights."""
    definition = all_ops()[name]
    args, kwargs = _seeded(definition.samples)[sample]
    fn, feeds, weights, nodes = Function("call"), {}, {}, []
    for i, tensor in enumerate(args):
        if i < inputs:
            feeds[f"in{i}"] = tensor
            nodes.append(fn.add_input(f"in{i}", TensorType.of(tensor)))
        else:
            weights[f"w{i}"] = Weight.of(f"w{i}", tensor)
            nodes.append(fn.weight(weights[f"w{i}"]))
    fn.set_outputs({"y": fn.call(definition.overload, *nodes, **kwargs)})
    return fn, feeds, weights, definition.meaning(*args, **kwargs)


@pytest.mark.parametrize("sample", [0, 2, 3])
def test_experts_that_are_weights_take_one_kernel(sample: int, tmp_path: Path) -> None:
    fn, feeds, weights, want = with_weights("moe", sample, 3)
    assert decompose(fn) == 0
    model = emit(fn, WeightStore(weights)).model
    assert [node.op_type for node in model.graph].count("MoE") == 1
    close(run_session(fn, feeds, tmp_path, weights)["y"], want)


def test_unknown_op_is_named() -> None:
    fn, _ = function_of(A.lgamma.default, (x(3),), {})
    with pytest.raises(UnsupportedError, match=r"aten\.lgamma"):
        decompose(fn)


def test_emitting_what_has_no_row_names_op_and_place() -> None:
    fn = Function("step")
    node = fn.add_input("a", TensorType.parse("f32[B]"))
    fn.set_outputs({"y": fn.call(A.lgamma.default, node)})
    with pytest.raises(UnsupportedError, match=r"lgamma.*%lgamma"):
        emit(fn, WeightStore())


def test_conditional_row_falls_back_to_its_meaning(tmp_path: Path) -> None:
    flat = (x(5, 8), x(5, 8), p(8))
    fn, _ = function_of(G.add_rms_norm.default, flat, {"eps": 1e-6})
    assert decompose(fn) == 1  # the kernel takes three axes
    q, k, v, mask = x(1, 2, 3, 8), x(1, 2, 9, 8), x(1, 2, 9, 8), torch.ones(1, 1, 3, 9, dtype=BOOL)
    sinks, options = x(2), {"scale": 0.3}
    fn, _ = function_of(G.attend.default, (q, k, v, mask, None, sinks), options)
    assert decompose(fn) == 1
    got = call_in_session(G.attend.default, (q, k, v, mask, None, sinks), options, tmp_path)
    close(got[0], G.attend.default(q, k, v, mask, None, sinks, **options))


@pytest.mark.parametrize("op", ["add_rms_norm", "ort_add_layer_norm"])
def test_fused_norms_do_not_return_what_training_needs(op: str) -> None:
    definition = all_ops()[op]
    args, options = next(definition.samples())
    args = tuple(x(1, 4, 8) if arg.dim() > 1 else arg for arg in args)
    fn, _ = function_of(definition.overload, args, options)
    (norm,) = emit(fn, WeightStore()).model.graph
    assert [bool(value.name) for value in norm.outputs] == [True, False, False, True]
