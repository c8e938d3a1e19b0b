"""Type inference: symbols, what depends on sizes is refused, arguments are checked first."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.ir import Function, InputError, Sym, TensorType, VerifyError, make_dim, run
from graftwork.ir.inference.infer import _infer, _shapes, infer
from graftwork.ir.program import ModelInfo, Program
from graftwork.ir.types import DTYPES
from graftwork.ir.weights import WeightStore

A, G = torch.ops.aten, torch.ops.graftwork
B, T, C = Sym("B"), Sym("T"), Sym("C")


class Scene:
    """x f32[B,T,64], table f32[512,64], ids i64[B,T]."""

    def __init__(self) -> None:
        self.fn = Function("step")
        self.x = self.fn.add_input("x", TensorType.parse("f32[B,T,64]"))
        self.table = self.fn.add_input("table", TensorType.parse("f32[512,64]"))
        self.ids = self.fn.add_input("ids", TensorType.parse("i64[B,T]"))
        self.cache = self.fn.add_input("cache", TensorType.parse("f32[B,2,C,8]"))

    def type(self, target: Any, *args: Any, **kwargs: Any) -> str:
        return str(self.fn.call(target, *args, **kwargs).meta["type"])


SYMBOLIC = {
    "f32[B*T,64]": lambda s: (A.view.default, s.x, [-1, 64]),
    "f32[B,T,4,16]": lambda s: (A.view.default, s.x, [B, T, 4, 16]),
    "f32[B,2*T,64]": lambda s: (A.cat.default, [s.x, s.x], 1),
    "f32[B,T,C]": lambda s: (A.full.default, [B, T, C], 0.0),
    "i64[T]": lambda s: (A.arange.start_step, 0, T),
    "f32[B,T-1,64]": lambda s: (A.slice.Tensor, s.x, 1, 1, 2**63 - 1),
    "f32[T,64]": lambda s: (A.slice.Tensor, s.table, 0, 0, T),
    "f32[T,64] ": lambda s: (A.slice.Tensor, s.table, 0, make_dim("512 - T"), None),
    "f32[B,1,64]": lambda s: (A.slice.Tensor, s.x, 1, -1, 2**63 - 1),
    "f32[B,1,64] ": lambda s: (A.slice.Tensor, s.x, -2, 0, 1),
    "f32[B,1,64]  ": lambda s: (A.slice.Tensor, s.x, 1, T - 1, T),
    "f32[B,T,16]": lambda s: (A.slice.Tensor, s.x, 2, 8, 24),
    "f32[B,64]": lambda s: (A.select.int, s.x, 1, -1),
    "f32[B,T,64]": lambda s: (A.embedding.default, s.table, s.ids),
    "bool[B,1,T,C]": lambda s: (G.step_mask.default, s.fn.input("ids"), s.ids, None, C),
    "f32[B,T]": lambda s: (A.mean.dim, s.x, -1),
}


@pytest.mark.parametrize("expected", [e for e in SYMBOLIC if "bool" not in e])
def test_symbolic_results(expected: str) -> None:
    scene = Scene()
    target, *args = SYMBOLIC[expected](scene)
    assert scene.type(target, *args) == expected.strip()


REFUSED = {
    "would hold only where C >= T": lambda s: (A.arange.start_step, T, C),
    "lies within T depends on T": lambda s: (A.slice.Tensor, s.x, 1, 0, 5),
    "lies within T depends on T ": lambda s: (A.slice.Tensor, s.x, 1, -5, None),
    "lies within T depends on T  ": lambda s: (A.slice.Tensor, s.x, 1, T - 3, None),
    "slices of symbolic length have step 1": lambda s: (A.slice.Tensor, s.x, 1, 0, None, 2),
    "whether 3 lies within T depends on T": lambda s: (A.select.int, s.x, 1, 3),
    "would hold only where T >= 7": lambda s: (A.topk.default, s.x, 7, 1),
    "whether it is 1": lambda s: (A.squeeze.dim, s.x, 1),
    "whether it is 1 ": lambda s: (A.squeeze.dims, s.x, [0, 2]),
    "not a dimension: '((T + 1)//2)'": lambda s: (A.chunk.default, s.x, 2, 1),
    "invalid for input of size 64*B*T": lambda s: (A.view.default, s.x, [2, 3, 64]),
    "must match the size of tensor b (C)": lambda s: (
        A.add.Tensor, s.x, s.fn.call(A.full.default, [B, T, C], 0.0),
    ),
    "size must be a list (a size each), not 'B'": lambda s: (A.view.default, s.x, "B"),
    "size must be a list (a size each), not [True]": lambda s: (A.view.default, s.x, [True]),
    "dim must be an integer, not the size T": lambda s: (A.select.int, s.x, T, 0),
    "self must be a tensor, not None": lambda s: (A.neg.default, None),
    "it takes 2 positional arguments, not 3": lambda s: (A.view.default, s.x, [1], 2),
    "not all results": lambda s: (
        A.neg.default, s.fn.call(A.split_with_sizes.default, s.x, [60, 4], 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_name_the_op_and_say_why(reason: str) -> None:
    scene = Scene()
    target, *args = REFUSED[reason](scene)
    with pytest.raises(VerifyError) as caught:
        scene.fn.call(target, *args)
    message = str(caught.value)
    assert message.startswith(f"{target} cannot take (") or "not all results" in reason
    assert reason.strip().removeprefix("not ") in message


def test_what_is_said_does_not_depend_on_what_was_inferred_before() -> None:
    _shapes.cache_clear()
    for first in (C, T):
        _infer.cache_clear()
        fn = Function("step")
        fn.call(A.full.default, [first], 0.0)
        with pytest.raises(VerifyError, match="would hold only where C >= T"):
            fn.call(A.arange.start_step, T, C)
        _shapes.cache_clear()


def test_keyword_arguments_are_checked() -> None:
    scene = Scene()
    for kwargs, reason in (
        ({"dtype": T}, "dtype must be a dtype or None, not the size T"),
        ({"kind": 1}, "it has no argument 'kind'; it has self, dtype"),
        ({"input": 1}, "it has no argument 'input'"),
    ):
        with pytest.raises(VerifyError, match=reason):
            scene.fn.call(A._to_copy.default, scene.x, **kwargs)
    with pytest.raises(VerifyError, match="self is given twice"):
        infer(A.neg.default, (scene.x,), {"self": scene.x})


def test_a_refused_guess_leaves_no_trace() -> None:
    """After an op that guessed T >= 7, another that needs it is refused just the same."""
    scene = Scene()
    for _ in range(2):
        with pytest.raises(VerifyError, match="T >= 7"):
            scene.fn.call(A.topk.default, scene.x, 7, 1)
        _infer.cache_clear()
    assert scene.type(A.view.default, scene.x, [B * T, 64]) == "f32[B*T,64]"


def test_a_granted_guess_holds_for_its_call_alone() -> None:
    """What an op asks of its operands is granted to its steps; other calls are refused."""
    scene = Scene()
    for _ in range(2):
        granted = scene.fn.call(A.topk.default, scene.x, 7, 1, granted=True)
        assert str(scene.fn.item(granted, 0).meta["type"]) == "f32[B,7,64]"
        with pytest.raises(VerifyError, match="T >= 7"):
            scene.fn.call(A.topk.default, scene.x, 7, 1)
        _infer.cache_clear()
    assert scene.fn.retype() == []


def test_results_by_index() -> None:
    scene = Scene()
    split = scene.fn.call(A.split_with_sizes.default, scene.x, [60, 4], 2)
    assert str(scene.fn.item(split, 1).meta["type"]) == "f32[B,T,4]"
    with pytest.raises(VerifyError, match="cannot take result 2"):
        scene.fn.item(split, 2)


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_types_hold_for_every_size(batch: int, width: int, data: st.DataObject) -> None:
    """What inference says of symbols is what the op does to numbers, width 1 included."""
    scene, fn = Scene(), None
    wanted = sorted(e for e in SYMBOLIC if "bool" not in e)
    target, *args = SYMBOLIC[data.draw(st.sampled_from(wanted))](scene)
    fn = scene.fn
    fn.set_outputs({"y": fn.call(target, *args)})
    program = Program("p", {"step": fn}, WeightStore(), ModelInfo("p", 1, 1))
    inputs = {
        "x": torch.randn(batch, width, 64),
        "table": torch.randn(512, 64),
        "ids": torch.zeros(batch, width, dtype=torch.int64),
        "cache": torch.zeros(batch, 2, width + 3, 8),
    }
    sizes = {"B": batch, "T": width, "C": width + 3}
    y = run(program, "step", inputs)["y"]
    assert TensorType.of(y) == fn.outputs["y"].meta["type"].bind(sizes)


# -- types and sizes


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.sampled_from(["B", "2*T+1", "7", "B*T"])))
def test_type_text_reads_back(dtype: str, dims: list[str]) -> None:
    parsed = TensorType.parse(f"{dtype}[{','.join(dims)}]")
    assert TensorType.parse(str(parsed)) == parsed and len(parsed.dims) == len(dims)


NUMBERS = st.integers(1, 50)


@given(NUMBERS, NUMBERS, st.integers(0, 5), st.integers(-5, 5))
def test_sizes_compute_like_numbers(b: int, t: int, k: int, c: int) -> None:
    size = make_dim(f"{k}*B*T + B*(T - 1) + {c}")
    value = k * b * t + b * (t - 1) + c
    bound = size.bind({"B": b, "T": t}) if isinstance(size, Sym) else size
    assert bound == value
    assert size.evaluate({"B": b, "T": t}.__getitem__) == value  # type: ignore[union-attr]
    assert Sym("B") * Sym("T") == Sym("T*B") and Sym("B") + Sym("T") - Sym("B") == Sym("T")


@pytest.mark.parametrize(
    "text", ["", "B/2", "B**B", "(B+T)**3", "f(B)", "B.x", "1e3", "B T", "2**70", "x" * 300, "*B"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="dimension"):
        make_dim(text)


def test_products_of_sums_are_bounded() -> None:
    with pytest.raises(InputError, match="not a dimension"):
        make_dim("*".join(["(A+B+C+D)"] * 12))


@pytest.mark.parametrize("text", ["f32", "f33[2]", "f32[2", "f32(2)", "[2]", "f32[2.5]"])
def test_what_is_no_type(text: str) -> None:
    with pytest.raises(InputError, match=r"not a (tensor type|dimension)"):
        TensorType.parse(text)


# -- torch's private parts


def test_the_private_shape_api_is_where_we_expect_it() -> None:
    """`infer._Shapes` and `pattern` use these. If this fails after an upgrade, fix them there."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    def has(function: Any, *names: str) -> bool:
        return set(names) <= set(inspect.signature(function).parameters)

    assert has(ShapeEnv.create_symbol, "source", "dynamic_dim", "constraint_dim")
    assert has(ShapeEnv.create_symintnode, "hint", "source")
    assert has(FakeTensorMode.__init__, "shape_env")
    assert has(make_fx, "decomposition_table", "pre_dispatch")
    assert DimDynamic.DYNAMIC and ConstantSource("x")
    shapes = _shapes()
    size = shapes.size("PROBE")
    assert shapes.dim(size * 2 + 1) == make_dim("2*PROBE + 1")
    known = len(shapes.env.guards)
    assert bool(size >= 9)  # a guess by its hint
    assert shapes.assumptions(known) == ["PROBE >= 9"]
    _shapes.cache_clear()
