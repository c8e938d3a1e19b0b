"""What calls mean: right for every size, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graftwork.ir import (
    Function,
    ModelInfo,
    Program,
    TensorType,
    UnsupportedError,
    VerifyError,
    WeightStore,
    ops,
    run,
)
from graftwork.ir.rewrite.expand import expand

A, G = torch.ops.aten, torch.ops.graftwork
QUERIES, KEYS, MASK = "f32[B,4,T,8]", "f32[B,2,C,8]", "bool[B,1,T,C]"

CALLS: dict[str, tuple[Any, list[str], dict[str, Any]]] = {
    "rows by a matrix": (A.matmul.default, ["f32[B,T,8]", "f32[8,C]"], {}),
    "batches": (A.matmul.default, ["f32[B,T,8]", "f32[B,8,C]"], {}),
    "batches of heads": (A.matmul.default, ["f32[B,2,T,C]", "f32[B,2,C,8]"], {}),
    "one batch for all": (A.matmul.default, ["f32[1,2,T,8]", "f32[B,2,8,C]"], {}),
    "one head for all": (A.matmul.default, ["f32[B,1,T,T]", "f32[B,2,T,8]"], {}),
    "rows by a column": (A.matmul.default, ["f32[B,2,T,C,8]", "f32[8,1]"], {}),
    "attention": (
        G.attend.default,
        [QUERIES, KEYS, KEYS, MASK],
        {"scale": 0.5, "softcap": 3.0, "sinks": "f32[4]"},
    ),
    "scores": (G.top_rows.default, [QUERIES, KEYS, MASK], {"scale": 0.5, "rows": 1, "picks": 2}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_meaning_holds_for_every_size(name: str) -> None:
    target, positional, named = CALLS[name]
    fn = Function("step")

    def argument(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return fn.add_input(f"x{len(fn.inputs)}", TensorType.parse(value))

    args = [argument(value) for value in positional]
    kwargs = {key: argument(value) for key, value in named.items()}
    node = fn.call(target, *args, **kwargs)
    wanted = node.meta["type"]
    fn.set_outputs({"y": node})
    expand(fn, node, lambda: {})
    assert fn.outputs["y"].meta["type"] == wanted
    program = Program("p", {"step": fn}, WeightStore(), ModelInfo("p", 1, 1))
    for sizes in ({"B": 1, "T": 1, "C": 3}, {"B": 2, "T": 3, "C": 5}):
        inputs = {str(x.target): _values(x.meta["type"].bind(sizes)) for x in fn.inputs}
        given = iter(inputs.values())
        values = [next(given) if isinstance(v, str) else v for v in positional]
        options = {key: next(given) if isinstance(v, str) else v for key, v in named.items()}
        torch.testing.assert_close(run(program, "step", inputs)["y"], target(*values, **options))


def _values(of: TensorType) -> torch.Tensor:
    shape = [int(dim) for dim in of.dims]  # type: ignore[arg-type]
    return torch.ones(shape, dtype=torch.bool) if of.dtype == torch.bool else torch.randn(shape)


def throwaway_number(x: torch.Tensor) -> torch.Tensor:
    """Asks for the batch as a number, and torch says which one it has in mind."""
    return x.reshape(int(x.shape[0]), -1) * 1.0


def throwaway_secret(x: torch.Tensor) -> torch.Tensor:
    """Looks up the number that stands for the batch; torch does not notice."""
    return x / x.shape[0].node.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize("meaning", [throwaway_number, throwaway_secret])
def test_a_meaning_of_one_size_is_refused(meaning: Callable[..., torch.Tensor]) -> None:
    with _throwaway(meaning) as target:
        fn = Function("step")
        x = fn.add_input("x", TensorType.parse("f32[B,T,8]"))
        node = fn.call(target, x)
        fn.set_outputs({"y": node})
        with pytest.raises(UnsupportedError, match=r"throwaway.* would hold only where B = \d+"):
            expand(fn, node)
        assert fn.outputs["y"] is node


@contextmanager
def _throwaway(meaning: Callable[..., torch.Tensor]) -> Iterator[Any]:
    ops.op("x: ...H -> x", samples=lambda: iter(()))(meaning)
    try:
        yield getattr(G, meaning.__name__).default
    finally:
        del ops._OPS[meaning.__name__]


def test_a_size_that_is_a_number_is_granted_to_nobody() -> None:
    """Not even to the steps of an op, which may compare sizes as the op asks for them."""
    fn = Function("step")
    x = fn.add_input("x", TensorType.parse("f32[B,T,8]"))
    for granted in (False, True):
        with pytest.raises(VerifyError, match="would hold only where B = 7919"):
            fn.call(A.view.default, x, [7919, -1], granted=granted)
