"""Liveness and dominators."""

from __future__ import annotations

import pytest
import torch
from graphs import programs
from handmade import Shape, cached_llama, llama
from hypothesis import given

from graftwork.ir import Function, GraftworkError, Program, Sym, TensorType
from graftwork.ir.execution.analysis import dominating_chain, last_uses, liveness

A, G = torch.ops.aten, torch.ops.graftwork


def test_markers_lie_on_the_chain() -> None:
    fn = llama(Shape(layers=3)).function("step")
    chain = dominating_chain(fn)
    assert chain[0] is fn.input("tokens") and chain[-1] is fn.outputs["logits"]
    assert set(fn.calls(G.hidden.default)) <= set(chain)
    assert not set(fn.calls(G.attention.default, G.glu.default)) & set(chain)


def test_an_output_without_the_input_is_an_error() -> None:
    fn = Function("step")
    fn.add_input("tokens", TensorType.parse("i64[B,T]"))
    fn.set_outputs({"logits": fn.call(A.full.default, [2], 0.0)})
    with pytest.raises(GraftworkError, match="logits does not depend on tokens"):
        dominating_chain(fn)


@given(programs())
def test_dominators_cut_every_path(program: Program) -> None:
    """Removing a value of the chain separates logits from tokens; no other value is on it."""
    fn = program.function("step")
    chain = set(dominating_chain(fn)) - {fn.input("tokens"), fn.outputs["logits"]}
    for removed in fn.calls():
        reached = {fn.input("tokens")}
        for node in fn:
            if node is not removed and reached & set(node.all_input_nodes):
                reached.add(node)
        cut = fn.outputs["logits"] not in reached
        assert cut == (removed in chain or removed is fn.outputs["logits"])


def test_peak_memory_by_hand() -> None:
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[B,T]"))  # 4 B T bytes
    a = fn.call(A.neg.default, x)  # x a
    b = fn.call(A.cat.default, [a, a], 1)  # x a b(2)
    c = fn.call(A.slice.Tensor, b, 1, 0, Sym("T"))  # x b(2) c, a is dead
    fn.set_outputs({"y": fn.call(A.add.Tensor, c, x)})  # x c y
    result = liveness(fn, {"B": 2, "T": 5})
    unit = 4 * 2 * 5
    assert [size // unit for size in result.live.values()] == [2, 4, 4, 3]
    assert result.peak == 4 * unit and result.at is b
    assert last_uses(fn)[x].name == "add" and last_uses(fn)[a] is b
    with pytest.raises(GraftworkError, match="needs sizes for T"):
        liveness(fn, {"B": 2})


def test_results_of_a_tuple_are_counted_once() -> None:
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[8]"))
    split = fn.call(A.split_with_sizes.default, x, [3, 5], 0)
    fn.set_outputs({"a": fn.item(split, 0), "b": fn.item(split, 1)})
    assert liveness(fn, {}).peak == 2 * 8 * 4


def test_values_that_nobody_uses_die_at_once() -> None:
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[8]"))
    for _ in range(5):
        fn.call(A.neg.default, x)
    fn.set_outputs({"x": x})
    assert liveness(fn, {}).peak == 2 * 8 * 4


@given(programs())
def test_liveness_bounds(program: Program) -> None:
    fn = program.function("step")
    result = liveness(fn, {"B": 2, "T": 3})
    sizes = [n.meta["type"] for n in fn if n.op != "output" and n.op != "get_attr"]
    tensors = [t for s in sizes for t in (s if isinstance(s, tuple) else (s,))]
    everything = sum(t.bind({"B": 2, "T": 3}).nbytes for t in tensors)
    assert 0 < result.peak <= everything
    assert set(result.live) == set(fn.calls())


def test_states_count_as_long_as_they_are_used() -> None:
    program = cached_llama(Shape(layers=2))
    fn = program.function("step")
    small = liveness(fn, {"B": 1, "T": 1, "S": 1, "C": 128}).peak
    large = liveness(fn, {"B": 1, "T": 1, "S": 1, "C": 4096}).peak
    rows = sum(s.type.bind({"B": 1, "C": 4096 - 128}).nbytes for s in program.states.values())
    assert rows <= large - small <= 3 * rows
