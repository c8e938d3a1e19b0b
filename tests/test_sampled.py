"""Types found by trying sizes are those of torch's symbolic shapes, and a process that only loads a
program and runs it goes without these."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from selection import one_in
from tiny import tiny_llama

from graftwork.backends import Target
from graftwork.ir import Program, Sym, TensorType
from graftwork.ir.inference.infer import _freeze, _plain, symbolic
from graftwork.ir.inference.trial_sizes import sampled
from graftwork.model import Model
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe

A, G = torch.ops.aten, torch.ops.graftwork
RECIPES = ("eagle2", "kv_int8", "int4", "layerskip", "calm", "mixture_of_depths", "hydragen")

pytestmark = pytest.mark.filterwarnings("ignore:.*untrained")


def made(recipe: str) -> Program:
    return run_passes(tiny_llama(4, dim=16), Recipe.load(recipe).steps)[0]


@pytest.mark.parametrize("recipe", one_in(2, RECIPES))
def test_they_are_those_of_symbolic_shapes(recipe: str) -> None:
    """Where they say, and they say nearly always."""
    asked = said = 0
    for fn in made(recipe).functions.values():
        for node in fn.calls():
            if not hasattr(node.target, "_schema"):  # the part of a result
                continue
            args, kwargs = _freeze(node.args), _freeze(dict(node.kwargs))
            plain = {name: _plain(value) for name, value in kwargs[1]}
            found = sampled(node.target, _plain(args), plain)
            asked += 1
            if found is not None:
                said += 1
                assert (found, []) == symbolic(node.target, args, kwargs), node.format_node()
    assert said > 0.9 * asked > 20


def t(text: str) -> TensorType:
    return TensorType.parse(text)


B, T, C = Sym("B"), Sym("T"), Sym("C")
UNSAID: dict[str, tuple[Any, list[Any]]] = {
    "two symbols are not one size": (A.add.Tensor, [t("f32[B,T]"), t("f32[B,C]")]),
    "nor in a product": (A.matmul.default, [t("f32[B,T]"), t("f32[C,4]")]),
    "whether a number of columns is there": (A.narrow.default, [t("f32[B,T]"), 1, 0, 5]),
    "whether one symbol is within another": (A.narrow.default, [t("f32[B,C]"), 1, 0, T]),
    "how many parts there are": (A.split.Tensor, [t("f32[B,T]"), 2, 1]),
    "halves of a symbol": (A.view.default, [t("f32[B,T,64]"), [B, -1, 128]]),
    "every other number up to a symbol": (A.arange.start_step, [0, T, 2]),
    "numbers between two symbols": (A.arange.start, [T, C]),
    "the values decide": (A.nonzero.default, [t("i64[B,T]")]),
}


@pytest.mark.parametrize("what", UNSAID)
def test_what_depends_on_sizes_is_not_said(what: str) -> None:
    target, args = UNSAID[what]
    assert sampled(target, args, {}) is None


SAID: dict[str, tuple[Any, list[Any]]] = {
    "f32[B,T,64]": (A.add.Tensor, [t("f32[B,T,64]"), t("bf16[64]")]),
    "bool[B,T]": (A.ge.Scalar, [t("i64[B,T]"), 3]),
    "f32[B,C+T,8]": (A.cat.default, [[t("f32[B,C,8]"), t("f32[B,T,8]")], 1]),
    "f32[B+C+T]": (A.cat.default, [[t("f32[B]"), t("f32[C]"), t("f32[T]")]]),
    "f32[B,T+3]": (A.constant_pad_nd.default, [t("f32[B,T]"), [0, 3]]),
    "f32[B*T,64]": (A.view.default, [t("f32[B,T,64]"), [-1, 64]]),
    "f32[64*B*T]": (A.view.default, [t("f32[B,T,64]"), [-1]]),
    "i64[B,T]": (A.full.default, [[B, T], 0]),
    "i64[T]": (A.arange.start_step, [0, T, 1]),
    "f32[B,T,T]": (A.bmm.default, [t("f32[B,T,64]"), t("f32[B,64,T]")]),
}


@pytest.mark.parametrize("type", SAID)
def test_what_fits_all_sizes_is_said(type: str) -> None:
    target, args = SAID[type]
    assert str(sampled(target, args, {})) == type


LOADS = """
import sys, torch, graftwork as gw
fast = gw.load(sys.argv[1], target="onnxruntime")
print(fast.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).tolist())
print([name for name in ("torch._dynamo", "torch._inductor", "torch.onnx") if name in sys.modules])
"""


@pytest.mark.parametrize("recipe", one_in(2, ["free", "int8_copyspec"]))
def test_loading_and_running_takes_no_compiler_into_memory(recipe: str, tmp_path: Any) -> None:
    chosen = Recipe.load(recipe)
    model = Model(made(recipe), Target("onnxruntime"), chosen.as_dict())
    model.save(tmp_path / "saved")
    text = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).tolist()
    command = [sys.executable, "-c", LOADS, str(tmp_path / "saved")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:2] == [str(text), "[]"]
