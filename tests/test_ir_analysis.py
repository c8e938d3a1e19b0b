"""Last uses and dominators."""

from __future__ import annotations

import pytest
import torch
from graphs import programs
from handmade import Shape, llama
from hypothesis import given

from graftwork.ir import Function, GraftworkError, Program, TensorType
from graftwork.ir.execution.analysis import dominating_chain, last_uses

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


def test_last_uses() -> None:
    fn = Function("f")
    x = fn.add_input("x", TensorType.parse("f32[B,T]"))
    a = fn.call(A.neg.default, x)
    b = fn.call(A.mul.Tensor, a, a)
    fn.set_outputs({"y": fn.call(A.add.Tensor, b, x)})
    last = last_uses(fn)
    assert last[x].name == "add" and last[a] is b
