"""Operands that do not lie in rows, or that broadcast, mean the same on every target."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.fx
from selection import mostly_long
from tiny import cached_llama, in_int8

from graftwork.backends import Target, compile
from graftwork.ir import Function, Program, Sym, TensorType, VerifyError, parse_program, verify
from graftwork.passes.engine.validate import reference_logits
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm

A, G = torch.ops.aten, torch.ops.graftwork
STEPS = 6
TOKENS = torch.randint(0, 32, (1, STEPS), generator=torch.Generator().manual_seed(1))

TARGETS = ("eager", "torch:cpu:float32", "onnxruntime:cpu:float32")

Edit = Callable[[Function, torch.fx.Node], torch.fx.Node]
"""Another value in the place of one operand, of its type."""


def turned(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    return fn.call(A.transpose.int, w, 0, 1)


def permuted(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    return fn.call(A.permute.default, w, [1, 0])


def one_row_for_all(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    rows, columns = w.meta["type"].dims
    return fn.call(A.expand.default, fn.call(A.slice.Tensor, w, 0, 0, 1), [rows, columns])


def columns_of_a_wider_one(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    both = fn.call(A.cat.default, [w, w], 1)
    return fn.call(A.slice.Tensor, both, 1, 3, 3 + w.meta["type"].dims[1])


def a_column(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    rows = w.meta["type"].dims[0]
    wide = fn.call(A.expand.default, fn.call(A.unsqueeze.default, w, 1), [rows, 3])
    stored = fn.call(A.mul.Tensor, wide, 0.5)
    return fn.call(A.select.int, stored, 1, 1)


def one_for_all(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    return fn.call(A.expand.default, fn.call(A.slice.Tensor, w, 0, 2, 3), [w.meta["type"].dims[0]])


def one_of_three_columns(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    both = fn.call(A.cat.default, [w, fn.call(A.mul.Tensor, w, 0.5), w], 1)
    return fn.call(A.slice.Tensor, both, 1, 1, 2)


def one_row_of_one(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    return fn.call(A.expand.default, fn.call(A.slice.Tensor, w, 0, 2, 3), w.meta["type"].dims)


def a_single_one(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    return fn.call(A.slice.Tensor, w, 0, 2, 3)


def every_second(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    both = fn.call(A.cat.default, [w, w], 0)
    return fn.call(A.slice.Tensor, both, 0, 0, 2 * w.meta["type"].dims[0], 2)


def viewed(fn: Function, w: torch.fx.Node) -> torch.fx.Node:
    # Values have no strides, so a view of a transposed one is as good as a reshape.
    flat = fn.call(A.view.default, turned(fn, w), [w.meta["type"].dims[0] * w.meta["type"].dims[1]])
    return fn.call(A.view.default, flat, w.meta["type"].dims)


def first_group(fn: Function, k: torch.fx.Node) -> torch.fx.Node:
    return fn.call(A.expand.default, fn.call(A.slice.Tensor, k, 1, 0, 1), k.meta["type"].dims)


QUANTIZED = "graftwork.quantized_linear.default"

CASES: dict[str, tuple[str, Edit, str, int]] = {
    "transposed": ("plain", turned, "aten.linear.default", 1),
    "permuted": ("plain", permuted, "aten.linear.default", 1),
    "expanded": ("plain", one_row_for_all, "aten.linear.default", 1),
    "sliced": ("plain", columns_of_a_wider_one, "aten.linear.default", 1),
    "norm, a column": ("plain", a_column, "graftwork.rms_norm.default", 1),
    "norm, expanded": ("plain", one_for_all, "graftwork.rms_norm.default", 1),
    "norm, one number": ("plain", a_single_one, "graftwork.rms_norm.default", 1),
    "norm, a step of two": ("plain", every_second, "graftwork.rms_norm.default", 1),
    "sum and norm, a column": ("fused", a_column, "graftwork.add_rms_norm.default", 2),
    "sum and norm, one number": ("fused", a_single_one, "graftwork.add_rms_norm.default", 2),
    "int8, transposed": ("int8", turned, QUANTIZED, 1),
    "int8, expanded": ("int8", one_row_for_all, QUANTIZED, 1),
    "int8, a column of scales": (
        "int8",
        one_of_three_columns,
        QUANTIZED,
        2,
    ),
    "int8, one scale for all": ("int8", one_row_of_one, QUANTIZED, 2),
    "viewed": ("plain", viewed, "aten.linear.default", 1),
    "keys of one group for all": ("plain", first_group, "graftwork.attend.default", 1),
    "values of one group for all": ("plain", first_group, "graftwork.attend.default", 2),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    plain = cached_llama()
    fused = FuseResidualNorm().run(plain).program
    return {"plain": plain, "fused": fused, "int8": in_int8().run(plain).program}


NAMED = {
    "plain": [
        (r"aten\.linear\((\S+), (\S+)\)", r"aten.linear(weight=\2, input=\1)"),
        (r"rms_norm\((\S+), (\S+), eps", r"rms_norm(weight=\2, x=\1, eps"),
        (r"embedding\((\S+), (\S+)\)", r"embedding(\1, indices=\2)"),
    ],
    "int8": [(r"r\((\S+), (\S+), (\S+), bits", r"r(\1, scale=\3, weight=\2, bits")],
    "fused": [(r"norm\((%\S+), (%\S+), (\S+), eps", r"norm(\1, weight=\3, residual=\2, eps")],
}


@pytest.mark.parametrize("kind", mostly_long(NAMED, {"fused"}))
def test_operands_may_be_named(kind, programs):
    """A text may name what has a place; rows and kernels have names of their own."""
    text = named = str(programs[kind])
    for found, other in NAMED[kind]:
        named, count = re.subn(found, other, named)
        assert count
    program = parse_program(named, programs[kind].weights)
    assert str(program) == text
    want = reference_logits(programs[kind], TOKENS)
    for target in TARGETS:
        torch.testing.assert_close(logits_of(program, target), want, atol=2e-5, rtol=1e-4)


def edited(program: Program, edit: Edit, target: str, place: int) -> Program:
    """The program with an operand of every such op whose shape allows it made anew."""
    fn, count = program.function("step").copy(), 0
    for node in fn.calls():
        operand = node.args[place] if str(node.target) == target else None
        dims = operand.meta["type"].dims if isinstance(operand, torch.fx.Node) else ()
        if len(dims) == 2 and dims[1] not in (1, dims[0]):
            continue
        if operand is None:
            continue
        with fn.graph.inserting_before(node):
            new = edit(fn, operand)
        node.update_arg(place, new)
        count += 1
    assert count
    changed = program.with_function(fn)
    verify(changed)
    return changed


def logits_of(program: Program, target: str) -> torch.Tensor:
    """Of tokens one at a time by a held call, which torch records and replays."""
    executable = compile(program, Target.parse(target))
    executable.begin(1, 8)
    one = torch.zeros(1, 1, dtype=torch.int64)
    given = {"tokens": one, "positions": one.clone(), "past": torch.zeros(1, dtype=torch.int64)}
    given["select"] = one.clone()
    call = executable.hold("step", given, ("logits",))
    parts = []
    for past in range(STEPS):
        executable.reserve(past + 1)
        given["tokens"].copy_(TOKENS[:, past : past + 1])
        given["positions"].fill_(past)
        given["past"].fill_(past)
        parts.append(call()["logits"].clone())
    return torch.cat(parts, 1)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_strided_operands_mean_the_same_everywhere(case, programs):
    kind, *how = CASES[case]
    program = edited(programs[kind], *how)
    want = reference_logits(program, TOKENS)
    plain = reference_logits(programs[kind], TOKENS)
    assert not torch.allclose(want, plain, atol=1e-2), "the edit changes nothing"
    for target in TARGETS:
        torch.testing.assert_close(
            logits_of(program, target), want, atol=2e-5, rtol=1e-4, msg=lambda m, t=target: t + m
        )


X, W8, ROWS, BYTES = "f32[B,T,8]", "u8[6,8]", "f32[6,1]", {"bits": 8, "group": 8}
Q, K, MASK = "f32[B,4,T,8]", "f32[B,2,C,8]", "bool[B,1,T,C]"

MISFITS = {
    "K of the weight": (G.quantized_linear, [X, "u8[6,9]", ROWS], BYTES),
    "scales": (G.quantized_linear, [X, W8, "f32[5,1]"], BYTES),
    "a scale for all": (G.quantized_linear, [X, W8, "f32[1,1]"], BYTES),
    "bias": (G.quantized_linear, [X, W8, ROWS, None, None, "f32[8]"], BYTES),
    "weight's dtype": (G.quantized_linear, [X, "f32[6,8]", ROWS], BYTES),
    "no columns": (G.quantized_linear, ["f32[B,T,0]", "u8[6,0]", "f32[6,0]"], BYTES),
    "key width": (G.attend, [Q, "f32[B,2,C,9]", K, MASK], {"scale": 1.0}),
    "value rows": (G.attend, [Q, K, "f32[B,2,T,8]", MASK], {"scale": 1.0}),
    "groups": (G.attend, [Q, "f32[B,3,C,8]", "f32[B,3,C,8]", MASK], {"scale": 1.0}),
    "no groups": (G.attend, [Q, "f32[B,0,C,8]", "f32[B,0,C,8]", MASK], {"scale": 1.0}),
    "mask rows": (G.attend, [Q, K, K, "bool[B,1,T,T]"], {"scale": 1.0}),
    "mask dtype": (G.attend, [Q, K, K, "f32[B,1,T,C]"], {"scale": 1.0}),
    "bias heads": (G.attend, [Q, K, K, MASK, "f32[B,2,T,C]"], {"scale": 1.0}),
    "sinks": (G.attend, [Q, K, K, MASK, None, "f32[2]"], {"scale": 1.0}),
    "batches": (G.attend, [Q, "f32[3,2,C,8]", K, MASK], {"scale": 1.0}),
    "new rows": (G.cache_write, [K, "f32[B,3,T,8]", "i64[B]"], {}),
    "past": (G.step_mask, ["i64[1]", "i64[B,T]", None, Sym("C")], {}),
    "ancestors": (G.step_mask, ["i64[B]", "i64[B,T]", "bool[B,T,C]", Sym("C")], {}),
    "angles": (G.rotary, [Q, "f32[B,T,5]", "f32[B,T,5]"], {}),
    "sines": (G.rotary, [Q, "f32[B,T,4]", "f32[B,T,3]"], {}),
    "rows to pick": (G.pick_rows, [X, "i64[1,S]"], {}),
    "experts": (
        G.moe,
        ["f32[B,8]", "i64[B,2]", "f32[B,2]", "f32[4,12,8]", "f32[4,8,5]"],
        {"activation": "silu"},
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_operands_that_do_not_fit_are_refused_when_types_are_inferred(what):
    op, operands, options = MISFITS[what]
    fn = Function("step")
    nodes = [
        fn.add_input(f"x{place}", TensorType.parse(text)) if isinstance(text, str) else text
        for place, text in enumerate(operands)
    ]
    with pytest.raises(VerifyError, match=r"must be|rows|scale"):
        fn.call(op.default, *nodes, **options)
