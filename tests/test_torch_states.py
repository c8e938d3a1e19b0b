"""Every state that a function returns is written, whatever its new value is made by."""

from __future__ import annotations

import pytest
import torch

from graftwork.backends.torch.emit import emit
from graftwork.ir import Function, ModelInfo, Program, Sym, TensorType, WeightStore, run

A, G = torch.ops.aten, torch.ops.graftwork
ROWS = TensorType(torch.float32, (Sym("B"), 1, Sym("C"), 2))
STATES = ("a", "b")


def step() -> tuple[Function, dict[str, torch.fx.Node]]:
    fn = Function("step")
    types = {"a": ROWS, "b": ROWS, "x": TensorType.parse("f32[B,1,T,2]")}
    types["past"] = TensorType.parse("i64[B]")
    return fn, {name: fn.add_input(name, type) for name, type in types.items()}


def _write(fn, given, state="a"):
    return fn.call(G.cache_write.default, given[state], given["x"], given["past"])


def _read_after(fn, given):
    write = _write(fn, given)
    return {"y": fn.call(A.add.Tensor, write, given["a"]), "a": write}


def _computed(fn, given):
    return {"y": fn.call(A.neg.default, given["a"]), "a": fn.call(A.add.Tensor, given["a"], 1.0)}


def _exchanged(fn, given):
    return {"y": fn.call(A.neg.default, given["x"]), "a": given["b"], "b": given["a"]}


def _one_value_twice(fn, given):
    write = _write(fn, given)
    return {"y": fn.call(A.neg.default, given["x"]), "a": write, "b": write}


def _other_state(fn, given):
    return {"y": fn.call(A.neg.default, given["b"]), "b": _write(fn, given)}


def _seen_before(fn, given):
    shape = [Sym("B"), Sym("C"), 2]
    return {"y": fn.call(A.reshape.default, given["a"], shape), "a": given["b"]}


CASES = (_read_after, _computed, _exchanged, _one_value_twice, _other_state, _seen_before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_states_hold_what_the_function_returns(case):
    fn, given = step()
    fn.set_outputs(case(fn, given))
    values = {name: torch.randn(2, 1, 5, 2) for name in STATES}
    values |= {"x": torch.randn(2, 1, 3, 2), "past": torch.tensor([0, 2])}
    program = Program("p", {"step": fn}, WeightStore(), ModelInfo("m", 8, 8))
    want = run(program, "step", values)
    held = {name: value.clone() for name, value in values.items()}
    (y,) = emit(fn, {}, STATES, ("y",))(*held.values())
    torch.testing.assert_close(y, want["y"])
    for name in STATES:
        torch.testing.assert_close(held[name], want.get(name, values[name]))
