"""Liveness, dominators and the residual stream."""

from __future__ import annotations

import pytest
import torch
from graphs import programs
from handmade import Shape, cached_llama, llama
from hypothesis import given

from graftwork.ir import Function, GraftworkError, Program, Sym, TensorType, Weight
from graftwork.ir.analysis import dominating_chain, last_uses, liveness, residual_stream

A, G = torch.ops.aten, torch.ops.graftwork


def without_markers(program: Program) -> tuple[Function, list[tuple[int, str, str]]]:
    """The step with its markers erased, and what they said: layer, point, name of the value."""
    fn = program.function("step").copy()
    markers = []
    for node in fn.calls(G.hidden.default):
        value = node.args[0]
        assert isinstance(value, torch.fx.Node)
        markers.append((node.kwargs["layer"], node.kwargs["point"], value.name))
        node.replace_all_uses_with(value)
        fn.graph.erase_node(node)
    return fn, markers  # type: ignore[return-value]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(layers=3),
        Shape(layers=2, layer_norm=True, bias=True, tied=True),
        Shape(layers=2, window=4, softcap=2.0, qk_norm=True),
        Shape(layers=1, slopes=True, rotary=0),
    ],
)
def test_the_stream_is_where_the_markers_were(shape: Shape) -> None:
    fn, markers = without_markers(llama(shape))
    found = [(p.layer, p.point, p.node.name) for p in residual_stream(fn)]
    assert found == markers


def block(fn: Function, x: torch.fx.Node, layer: int) -> torch.fx.Node:
    """An attention over x, not added to anything."""
    shape = [Sym("B"), Sym("T"), 2, 4]
    heads = fn.call(A.transpose.int, fn.call(A.view.default, x, shape), 1, 2)
    y = fn.call(G.attention.default, heads, heads, heads, layer=layer, scale=0.5)
    flat = [Sym("B"), Sym("T"), 8]
    return fn.call(A.view.default, fn.call(A.transpose.int, y, 1, 2), flat)


def start() -> tuple[Function, torch.fx.Node]:
    fn = Function("step")
    tokens = fn.add_input("tokens", TensorType.parse("i64[B,T]"))
    fn.add_input("positions", TensorType.parse("i64[B,T]"))
    weight = Weight.of("emb", torch.ones(7, 8))
    return fn, fn.call(A.embedding.default, fn.weight(weight), tokens)


def test_parallel_blocks_have_one_addition() -> None:
    fn, x = start()
    ends = []
    for layer in range(2):
        normed = fn.call(A.tanh.default, x)
        both = fn.call(A.add.Tensor, block(fn, normed, layer), fn.call(A.relu.default, normed))
        x = fn.call(A.add.Tensor, both, x)
        ends.append(x.name)
    fn.set_outputs({"logits": fn.call(A.tanh.default, x)})
    points = residual_stream(fn)
    assert [(p.layer, p.point) for p in points] == [(-1, "embedding"), (0, "block"), (1, "block")]
    assert [p.node.name for p in points[1:]] == ends


def test_a_scaled_embedding_is_the_stream_from_the_scaling_on() -> None:
    fn, x = start()
    scaled = fn.call(A.mul.Tensor, x, 3.0)
    x = fn.call(A.add.Tensor, scaled, block(fn, fn.call(A.tanh.default, scaled), 0))
    fn.set_outputs({"logits": x})
    points = residual_stream(fn)
    assert [p.node for p in points] == [scaled, x]


def test_no_stream_is_an_error() -> None:
    fn, x = start()
    fn.set_outputs({"logits": x})
    with pytest.raises(GraftworkError, match=r"one graftwork.attention a layer, got 0"):
        residual_stream(fn)
    y = block(fn, x, 0)
    fn.set_outputs({"logits": fn.call(A.unsqueeze.default, x, 3), "other": y})
    with pytest.raises(GraftworkError, match="no residual stream"):
        residual_stream(fn)
    fn.set_outputs({"logits": fn.call(A.full.default, [2], 0.0)})
    with pytest.raises(GraftworkError, match="logits does not depend on tokens"):
        residual_stream(fn)


def test_two_attentions_of_one_layer_are_an_error() -> None:
    fn, x = start()
    for _ in range(2):
        x = fn.call(A.add.Tensor, x, block(fn, x, 0))
    fn.set_outputs({"logits": x})
    with pytest.raises(GraftworkError, match=r"got 2 for the layers \[0\]"):
        residual_stream(fn)


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
