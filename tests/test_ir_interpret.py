"""The reference interpreter, functions and programs: results, and errors about their use."""

from __future__ import annotations

import pytest
import torch
from feeds import step_inputs
from graphs import symbols_of
from handmade import Shape, cached_llama, llama

from graftwork.ir import (
    Function,
    GraftworkError,
    InputError,
    ModelInfo,
    Program,
    Sym,
    TensorType,
    Weight,
    WeightStore,
    run,
    site_of,
    type_of,
)
from graftwork.ir.execution.interpret import bind_symbols

A = torch.ops.aten
SHAPE = Shape(layers=1, heads=2, groups=1, dim=4, inner=8, vocab=7)


def test_a_function_computes_what_its_ops_say() -> None:
    weight = Weight.of("w", torch.randn(3, 4))
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[B,4]"))
    flat = fn.call(A.view.default, fn.call(A.linear.default, x, fn.weight(weight)), [Sym("B") * 3])
    parts = fn.call(A.topk.default, flat, 2)
    fn.set_outputs({"best": fn.item(parts, 0), "which": fn.item(parts, 1), "same": x})
    program = Program("p", {"f": fn}, WeightStore({"w": weight}), ModelInfo("p", 1, 1))
    given = torch.randn(5, 4)
    out = run(program, "f", {"x": given})
    best, which = (given @ weight.load().T).reshape(15).topk(2)
    torch.testing.assert_close(out["best"], best)
    assert torch.equal(out["which"], which) and torch.equal(out["same"], given)


def test_an_empty_cache_changes_nothing() -> None:
    plain, cached = llama(SHAPE), cached_llama(SHAPE)
    before = run(plain, "step", step_inputs(plain))["logits"]
    after = run(cached, "step", step_inputs(cached))
    torch.testing.assert_close(after["logits"], before, rtol=1e-4, atol=1e-5)
    assert torch.equal(after["argmax"], after["logits"].argmax(-1))


def test_views_need_no_layout() -> None:
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[B,T]"))
    turned = fn.call(A.transpose.int, x, 0, 1)
    fn.set_outputs({"y": fn.call(A.view.default, turned, [Sym("B") * Sym("T")])})
    program = Program("p", {"f": fn}, WeightStore(), ModelInfo("p", 1, 1))
    given = torch.randn(2, 3)
    assert torch.equal(run(program, "f", {"x": given})["y"], given.T.reshape(6))


TOKENS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tokens": TOKENS}, r"step needs the input 'positions': i64\[B,T\]"),
        (
            {"tokens": TOKENS.int(), "positions": TOKENS},
            r"input 'tokens': expected i64\[B,T\], got i32\[2,3\]",
        ),
        (
            {"tokens": TOKENS, "positions": TOKENS[0]},
            r"input 'positions': expected i64\[B,T\], got i64\[3\]",
        ),
        (
            {"tokens": TOKENS, "positions": TOKENS[:, :2]},
            r"'positions': expected i64\[B,T\] with {'B': 2, 'T': 3}, got i64\[2,2\]",
        ),
    ],
)
def test_wrong_inputs(inputs: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(llama(SHAPE), "step", inputs)


def test_sizes_are_read_off_the_inputs() -> None:
    program = cached_llama(SHAPE)
    inputs = step_inputs(program, batch=3, width=4)
    sizes = bind_symbols(program.function("step"), inputs)
    assert sizes == {"B": 3, "T": 4, "S": 4, "C": 7}


def test_functions_say_what_they_have() -> None:
    program = llama(SHAPE)
    fn = program.function("step")
    assert symbols_of(fn) == {"B", "T"} and not fn.has_input("past")
    with pytest.raises(GraftworkError, match="step has no input 'past'; it has tokens, positions"):
        fn.input("past")
    with pytest.raises(GraftworkError, match=r"no function 'draft'; the program has \['step'\]"):
        program.function("draft")
    with pytest.raises(GraftworkError, match="draft has no output"):
        _ = Function("draft").output_node
    split = fn.call(A.split_with_sizes.default, fn.calls()[0], [1, 1], -1)
    with pytest.raises(GraftworkError, match=r"%split_with_sizes has several results"):
        type_of(split)


def test_a_copy_is_independent() -> None:
    program = llama(SHAPE)
    fn, copy = program.function("step"), program.function("step").copy()
    before = [(n.name, n.meta["type"], site_of(n)) for n in fn]
    assert [(n.name, n.meta["type"], site_of(n)) for n in copy] == before
    with copy.graph.inserting_before(copy.output_node):
        doubled = copy.call(A.mul.Tensor, copy.outputs["logits"], 2)
    copy.set_outputs({"logits": doubled})
    copy.add_input("extra", TensorType.parse("f32[B]"))
    assert [(n.name, n.meta["type"], site_of(n)) for n in fn] == before
    assert [str(n.target) for n in copy.inputs] == ["tokens", "positions", "extra"]


def test_pruning_drops_unused_weights() -> None:
    program = llama(SHAPE)
    extra = program.replace(weights=program.weights.adding(Weight.of("extra", torch.ones(1))))
    assert "extra" in extra.weights and "extra" not in extra.pruned().weights
    assert list(extra.pruned().weights) == [
        n for n in program.weights if n in program.function("step").weights
    ]


def test_memory_is_freed_after_the_last_use() -> None:
    """A long chain on large values needs a few of them, not all."""
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[N]"))
    for _ in range(40):
        x = fn.call(A.add.Tensor, x, 1.0)
    fn.set_outputs({"y": x})
    program = Program("p", {"f": fn}, WeightStore(), ModelInfo("p", 1, 1))
    alive: list[int] = []
    real = A.add.Tensor

    class Counting:
        """Stands for add and counts the chain's tensors that are still alive."""

        refs: list[object]

        def __init__(self) -> None:
            self.refs = []

        def __call__(self, a: torch.Tensor, b: float) -> torch.Tensor:
            import weakref

            result = real(a, b)
            self.refs.append(weakref.ref(result))
            alive.append(sum(ref() is not None for ref in self.refs))  # type: ignore[operator]
            return result

    counting = Counting()
    for node in fn.calls():
        node.target = counting
    run(program, "f", {"x": torch.zeros(8)})
    assert max(alive) <= 3
