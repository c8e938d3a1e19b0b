"""What is known of GPUs without one: on a device that has no data, as on one with data that the CPU
cannot read, all that a program makes must be where its weights are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from every_recipe import CASES, program_of
from tiny import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graftwork as gw
from graftwork.backends.faults import check_memory
from graftwork.backends.target import Target
from graftwork.backends.torch.emit import emit
from graftwork.backends.torch.gpu_products import quantized_linear
from graftwork.ir import Function, InputError, Program, Sym, TensorType, UnsupportedError, type_of
from graftwork.ir.ops.numerics import Numeric

ELSEWHERE = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Refuses calls that mix devices as a GPU does: single numbers may come from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                assert tensor.device == ELSEWHERE, f"{func} has a tensor on {tensor.device}"
        return result


def sizes_of(fn: Function) -> dict[str, int]:
    """Sizes for a function's symbols: two texts, three tokens, room for a whole context."""
    dims = [dim for node in fn.inputs for dim in type_of(node).dims if isinstance(dim, Sym)]
    return {d.text: {"B": 2, "T": 3}.get(d.text, 128) for d in dims if d.plain}


def empty(type: TensorType) -> torch.Tensor:
    return torch.empty(type.shape, dtype=type.dtype, device=ELSEWHERE)


def run_elsewhere(program: Program, name: str) -> Iterator[torch.Tensor]:
    """What a function returns where its weights and inputs are on another device."""
    fn, states = program.function(name), list(program.states)
    weights = {key: empty(weight.type) for key, weight in program.weights.items()}
    module = emit(fn, weights, states, tuple(fn.outputs), device=ELSEWHERE)
    inputs = [empty(type_of(node).bind(sizes_of(fn))) for node in fn.inputs]
    with OneDevice():
        yield from module(*inputs)


@pytest.mark.parametrize("name", CASES)
def test_all_that_functions_make_is_on_their_device(name: str, tmp_path: Path) -> None:
    program = program_of(name, tmp_path)
    for function in program.functions:
        for result in run_elsewhere(program, function):
            assert result.device == ELSEWHERE, function


@pytest.mark.parametrize(("backend", "group"), [("torch", 1), ("onnxruntime", 8)])
def test_weights_of_few_bits_are_refused_where_they_have_no_kernels(
    backend: str, group: int
) -> None:
    """When a model is optimized, not when it first generates."""
    model = build(ARCHS["llama"])
    recipe = gw.Recipe.load("int4").with_options([f"quantize_weights.group={group}"])
    said = rf"weights of . bits in groups of {group} .* on the CPU alone; take groups of 32"
    with pytest.raises(UnsupportedError, match=said):
        gw.optimize(model, recipe, target=f"{backend}:cuda")


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_weights_of_few_bits_are_taken_where_they_have_kernels(backend: str) -> None:
    model = build(ARCHS["llama"])
    int4 = gw.Recipe.load("int4").with_options(["quantize_weights.group=16"])
    for recipe in ("baseline", "int8", int4):
        gw.optimize(model, recipe, target=f"{backend}:cuda")


def test_kernels_of_a_gpu_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="need the package triton"):
        gw.optimize(build(ARCHS["llama"]), "int8", target="torch:cuda")


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_products_of_few_bits_are_made_there_too(bits: int) -> None:
    """By shape rules alone: of one token, some and a prompt's."""
    type = Numeric(bits, 24, "affine").types(10, 48)[0]
    weight = torch.empty(type.shape, dtype=torch.uint8, device=ELSEWHERE)
    scale, offset = (torch.empty(10, 2, device=ELSEWHERE) for _ in range(2))
    for tokens in (1, 20, 200):
        x = torch.empty(1, tokens, 48, dtype=torch.bfloat16, device=ELSEWHERE)
        with OneDevice():
            found = quantized_linear(x, weight, scale, offset, bits=bits, group=24)
        assert found.shape == (1, tokens, 10) and found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("free", "said"),
    [(10_000, "use onnxruntime:cpu, or a larger"), (40_000, "float16 or bfloat16")],
)
def test_a_gpu_that_is_too_small(free: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tiny_llama(1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80_000))
    size = sum(weight.type.nbytes for weight in program.weights.values())
    assert size // 2 < 40_000 < size
    with pytest.raises(InputError, match=f"weights take 0.0 GB.*{said}"):
        check_memory(program, Target("onnxruntime", "cuda"))
    check_memory(program, Target("onnxruntime", "cpu"))
