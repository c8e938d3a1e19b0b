"""Every op of the set, by its samples: nothing here knows any op by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import in_turn
from torch._subclasses.fake_tensor import FakeTensorMode

from graftwork.ir import (
    Function,
    InputError,
    ModelInfo,
    Program,
    TensorType,
    WeightStore,
    ops,
    verify,
)
from graftwork.ir.ops import Native, OpDef, Sample, all_ops, op_of
from graftwork.ir.ops.stages import find_op, is_core
from graftwork.ir.text.expressions import Expression
from graftwork.ir.text.lexer import Cursor, Source
from graftwork.ir.text.parser import parse_function
from graftwork.ir.text.printer import function_text

Case = tuple[OpDef, Sample]


def sampled() -> Iterator[Any]:
    torch.manual_seed(0)
    for name, op in all_ops().items():
        for i, sample in enumerate(op.samples()):
            yield pytest.param(op, sample, id=f"{name}-{i}")


def every_op() -> Iterator[Any]:
    yield from (pytest.param(op, id=name) for name, op in all_ops().items())


def results(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def tensors(sample: Sample) -> list[torch.Tensor]:
    args, kwargs = sample
    return [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]


def as_function(op: OpDef, sample: Sample) -> Function:
    """A function that calls the op on inputs of the sample's types."""
    fn = Function("step")

    def argument(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return fn.add_input(f"x{len(fn.inputs)}", TensorType.of(value))

    args = [argument(a) for a in sample[0]]
    kwargs = {k: argument(v) for k, v in sample[1].items()}
    node = fn.call(op.overload, *args, **kwargs)
    if isinstance(node.meta["type"], TensorType):
        fn.set_outputs({"y": node})
    else:
        fn.set_outputs({f"y{i}": fn.item(node, i) for i in range(len(node.meta["type"]))})
    return fn


@in_turn(sampled)
def test_overload_runs_the_meaning(op: OpDef, sample: Sample) -> None:
    args, kwargs = sample
    called, meant = results(op.overload(*args, **kwargs)), results(op.meaning(*args, **kwargs))
    for a, b in zip(called, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@in_turn(sampled)
def test_fake_kernel_agrees(op: OpDef, sample: Sample) -> None:
    real = results(op.overload(*sample[0], **sample[1]))
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        args = [fake(a) for a in sample[0]]
        guessed = results(op.overload(*args, **{k: fake(v) for k, v in sample[1].items()}))
    assert [(t.shape, t.dtype) for t in guessed] == [(t.shape, t.dtype) for t in real]


@in_turn(sampled)
def test_inference_agrees(op: OpDef, sample: Sample) -> None:
    fn = as_function(op, sample)
    real = results(op.overload(*sample[0], **sample[1]))
    assert [n.meta["type"] for n in fn.outputs.values()] == [TensorType.of(t) for t in real]


@in_turn(sampled)
def test_results_alias_nothing_and_arguments_stay(op: OpDef, sample: Sample) -> None:
    given = tensors(sample)
    before = [t.clone() for t in given]
    made = results(op.overload(*sample[0], **sample[1]))
    homes = [t.untyped_storage().data_ptr() for t in (*given, *made) if t.numel()]
    assert len(homes) == len(set(homes)), f"{op.name}: a result shares memory"
    for kept, now in zip(before, given, strict=True):
        torch.testing.assert_close(now, kept, rtol=0, atol=0, equal_nan=True)


@in_turn(sampled)
def test_a_call_prints_and_parses(op: OpDef, sample: Sample) -> None:
    text = function_text(as_function(op, sample))
    assert function_text(parse_function(text, WeightStore())) == text


@in_turn(every_op)
def test_documentation_shows_a_call(op: OpDef) -> None:
    match = re.search(r"``(%[^`]+)``", op.doc)
    assert match, f"{op.name}: the docstring has no example ``%y: type = graftwork.{op.name}(...)``"
    head, _, call = match.group(1).partition(" = ")
    cursor = Cursor(Source(call))
    expression = Expression(cursor, cursor.span(), lambda token: token)
    node, name = expression.call()
    assert find_op(name) is op.overload
    args, kwargs = expression.arguments(node)
    schema = op.overload._schema.arguments
    assert len(args) + len(kwargs) <= len(schema)
    assert set(kwargs) <= {a.name for a in schema}
    required = {a.name for a in schema if not a.has_default_value()}
    missing = required - {a.name for a in schema[: len(args)]} - set(kwargs)
    assert not missing, f"{op.name}: the example leaves out {missing}"
    shown = head.partition(": ")[2].strip("()")
    for part in re.findall(r"\w+\[[^\]]*\]", shown):
        assert str(TensorType.parse(part)) == part


@in_turn(every_op)
def test_documentation_says_what_shapes(op: OpDef) -> None:
    prose = re.sub(r"``[^`]+``", "", op.doc)
    tensor_arguments = [a.name for a in op.overload._schema.arguments if "Tensor" in str(a.type)]
    unmentioned = [n for n in tensor_arguments if not re.search(rf"\b{n}\b", op.doc)]
    assert "[" in prose or "of one shape" in prose, f"{op.name}: the prose gives no shapes"
    assert not unmentioned, f"{op.name}: {unmentioned} are not documented"


def test_core_aten_is_limited() -> None:
    assert is_core(torch.ops.aten.linear.default)
    assert find_op("aten.add.Tensor") is torch.ops.aten.add.Tensor
    refused = (
        "aten.add_.Tensor", "aten.from_file", "aten.rand", "aten.nonzero", "aten.no_such",
        "aten.add.nope", "aten.__class__", "aten.sym_size.int", "graftwork.no_such",
        "graftwork.glu.other", "prims.add", "os.system", "aten", "",
    )  # fmt: skip
    assert [name for name in refused if find_op(name) is not None] == []


def test_a_text_cannot_call_what_trusts_its_caller_or_reads_old_memory() -> None:
    """Ops that write where an argument says, that return what was in memory, change, or guess."""
    unsafe = re.compile(r"backward|empty|rand|dropout|resize|set_|as_strided|_$|\.out$|_out$")
    names = [str(op) for op in _all_aten() if is_core(op)]
    assert len(names) > 120
    assert [name for name in names if unsafe.search(name.removesuffix(".default"))] == []
    halves = [name for name in names if name.startswith(("aten._", "aten.native_"))]
    assert set(halves) == {
        "aten._log_softmax.default",
        "aten._softmax.default",
        "aten._to_copy.default",
        "aten.native_layer_norm.default",
    }


def _all_aten() -> Iterator[torch._ops.OpOverload]:
    """Every ATen overload that torch has."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and hasattr(torch.ops.aten, packet):
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def test_the_table_of_ops_is_up_to_date() -> None:
    rows = [op.row for name, op in sorted(all_ops().items()) if "ir.ops" in op.meaning.__module__]
    table = (Path(__file__).parent.parent / "docs" / "ops.md").read_text(encoding="utf-8")
    shown = [line for line in table.splitlines() if line.startswith("| `")]
    assert shown == rows, "docs/ops.md differs; its rows are these:\n" + "\n".join(rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q: BT -> x", r"names \['q'\]; its arguments are \['x'\]"),
        ("x: i64  BT -> x", "no operand"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    def meaning(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(InputError, match=said):
        ops.op(text, samples=lambda: iter(()))(meaning)


@pytest.mark.parametrize(
    ("native", "said"),
    [
        (Native("BTK"), r"told the sizes 'BTK', got 'K': expected each letter once, of BNT"),
        (Native("BTB"), "got 'B': expected each letter once"),
        (Native("BT", cast="z"), "casts 'z'; expected operands, of x, y"),
    ],
)
def test_what_a_kernel_is_told_must_be_known(native: Native, said: str) -> None:
    """It trusts what it gets: a wrong letter would be a wrong size."""

    def meaning(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x.clone()

    with pytest.raises(InputError, match=said):
        ops.op("x: BT, y: BN -> x", samples=lambda: iter(()), native=native)(meaning)


def test_a_new_op_is_one_block() -> None:
    """What a contributor writes for an op is its declaration and meaning, and no more."""

    def samples() -> Iterator[Sample]:
        yield (torch.randn(2, 3),), {"times": 2}

    @ops.op("x: BT -> x", samples=samples)
    def throwaway(x: torch.Tensor, *, times: int) -> torch.Tensor:
        """x, many times over.

        ``%y: f32[B,T] = graftwork.throwaway(%x, times=3)``

        x [B,T].
        """
        return x * times

    op = all_ops()["throwaway"]
    try:
        (sample,) = op.samples()
        for check in (
            test_overload_runs_the_meaning, test_fake_kernel_agrees, test_inference_agrees,
            test_results_alias_nothing_and_arguments_stay, test_a_call_prints_and_parses,
        ):  # fmt: skip
            check(op, sample)
        test_documentation_shows_a_call(op)
        assert op_of(op.overload) is op
        verify(_program_with(op))
    finally:
        del ops._OPS["throwaway"]


def _program_with(op: OpDef) -> Program:
    fn = Function("step")
    tokens = fn.add_input("tokens", TensorType.parse("i64[B,T]"))
    fn.add_input("positions", TensorType.parse("i64[B,T]"))
    wide = fn.call(torch.ops.aten._to_copy.default, tokens, dtype=torch.float32)
    wide = fn.call(op.overload, wide, times=2)
    fn.set_outputs({"logits": fn.call(torch.ops.aten.unsqueeze.default, wide, 2)})
    info = ModelInfo("test", 1, 8)
    return Program("test", {"step": fn}, WeightStore(), info, stage="canonical")
