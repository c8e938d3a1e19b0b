"""Linear layers as loops: few rows, whole numbers, the same results."""

from __future__ import annotations

import platform
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from graftwork.backends.torch import loops as loops_module
from graftwork.backends.torch.compiled import integer_vectors, multiplies_bytes
from graftwork.backends.torch.emit import emit
from graftwork.backends.torch.loops import (
    LINEAR_INT8,
    WIDEST,
    attend,
    linear,
    linear_exact,
    loops,
    row_sums,
)
from graftwork.backends.torch.rows import Prepared
from graftwork.ir import Function, TensorType, Weight
from graftwork.ir.ops import norm
from graftwork.ir.ops.attention import attend as attend_meaning
from graftwork.ir.ops.quant import linear_int8


def int8_case(rows: tuple[int, ...], columns: int, most: int) -> tuple[torch.Tensor, ...]:
    """Rows, weights and scales, extreme sums among them."""
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randint(-most, most + 1, (40, columns), generator=generator).to(torch.int8)
    weight[0], weight[1] = most, -most
    x = torch.randn(*rows, columns, generator=generator)
    x[0, 0] = 1
    return x, weight, torch.rand(40, generator=generator)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("columns", [8, 1300])
@pytest.mark.parametrize("rows", [(1, 1), (1, 3), (2, 4), (1, 9), (3, 7), (1, 33)])
def test_whole_numbers_give_the_same_bits(rows, columns, coarse):
    x, weight, scale = int8_case(rows, columns, 63 if coarse else 127)
    bias = torch.arange(40.0)
    want = linear_int8(x, weight, scale, bias, coarse=coarse)
    for sums in (None, row_sums(weight)):
        result = linear_exact(x, weight, scale, bias, coarse=coarse, sums=sums)
        assert torch.equal(result, want)


@pytest.mark.parametrize(("coarse", "bytewise"), [(False, False), (False, True), (True, True)])
def test_compiled_loops_multiply_vectors_and_give_the_same_bits(
    coarse, bytewise, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, weight, scale = int8_case((1, 9), 1300, 63 if coarse else 127)
    compiled = torch.compile(
        partial(linear_exact, coarse=coarse), fullgraph=True, options=integer_vectors()
    )
    sums = row_sums(weight) if bytewise else None
    want = linear_int8(x, weight, scale, coarse=coarse)
    assert torch.equal(compiled(x, weight, scale, sums=sums), want)
    if platform.machine() == "x86_64" and (multiplies_bytes() or not bytewise):
        wanted = ["pdpbus"] if bytewise else ["pmaddwd", "pdpwss"]
        found = [instructions(path) for path in tmp_path.rglob("*.so")]
        assert any(name in code for name in wanted for code in found), "no vectors"


def instructions(path: Path) -> str:
    """The machine code of a library, as text."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_integer_vectors_int8_stays_as_it_is(monkeypatch):
    assert LINEAR_INT8 in loops()
    monkeypatch.delattr(torch._inductor.config.cpp, "march")
    assert integer_vectors() is None
    assert LINEAR_INT8 not in loops()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="asks Linux about the processor")
def test_processors_with_dot_products_multiply_bytes(monkeypatch):
    able = set(Path("/proc/cpuinfo").read_text().split())
    assert multiplies_bytes() == bool(able & {"avx512_vnni", "avx_vnni"})
    for bytewise, made in ((True, {"sums"}), (False, set())):
        monkeypatch.setattr(loops_module, "multiplies_bytes", lambda answer=bytewise: answer)
        assert set(loops()[LINEAR_INT8].made) == made


@pytest.mark.parametrize("rows", [(1, 1), (2, 4), (1, 9), (1, WIDEST + 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_loops_are_a_linear_layer(rows, dtype):
    x, weight = torch.randn(*rows, 100).to(dtype), torch.randn(40, 100).to(dtype)
    bias = torch.randn(40).to(dtype)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("outputs", [40, 41])
@pytest.mark.parametrize("rows", [(1, 8), (1, 13)])
def test_pairs_of_outputs_have_the_same_bits(rows, outputs, monkeypatch):
    x, weight = torch.randn(*rows, 100), torch.randn(outputs, 100)
    monkeypatch.setattr(loops_module, "PAIRS", False)
    alone = linear(x, weight)
    monkeypatch.setattr(loops_module, "PAIRS", True)
    monkeypatch.setattr(loops_module, "NEAR", 0)
    assert torch.equal(linear(x, weight), alone)


def test_what_a_row_wants_of_a_weight_is_made_once():
    fn = Function("step")
    x = fn.add_input("x", TensorType.of(torch.zeros(1, 2, 8)))
    weight = torch.randint(-127, 128, (6, 8), dtype=torch.int8)
    given = {"w": weight, "scale": torch.rand(6)}
    nodes = [fn.weight(Weight.of(name, tensor)) for name, tensor in given.items()]
    fn.set_outputs({"y": fn.call(LINEAR_INT8, x, *nodes)})
    made: list[torch.Tensor] = []

    def sums(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor)
        return row_sums(tensor)

    rows = {LINEAR_INT8: Prepared(linear_exact, {"sums": (1, sums)})}
    module = emit(fn, given, [], ["y"], rows=rows)
    for seed in range(2):
        values = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(seed))
        want = linear_int8(values, weight, given["scale"])
        assert torch.equal(module(values)[0], want)
    assert len(made) == 1 and made[0] is weight


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"softcap": 5.0}, {"sinks": torch.randn(4)}])
def test_attention_loops_are_attention(width, extra):
    q, k, v = torch.randn(2, 4, width, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = (
        torch.arange(9) < torch.tensor([4, 7])[:, None, None, None] + torch.arange(width)[:, None]
    )
    bias = torch.randn(2, 4, width, 9)
    for added in (None, bias):
        want = attend_meaning(q, k, v, mask, added, scale=0.3, **extra)
        result = attend(q, k, v, mask, added, scale=0.3, **extra)
        torch.testing.assert_close(result, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("columns", [8, 100])
def test_norms_in_blocks_are_norms(columns):
    x, other, weight = torch.randn(2, 3, columns), torch.randn(2, 3, columns), torch.rand(columns)
    close = partial(torch.testing.assert_close, atol=1e-6, rtol=1e-5)
    close(loops_module.rms_norm(x, weight, eps=1e-5), norm.rms_norm(x, weight, eps=1e-5))
    result = loops_module.add_rms_norm(x, other, weight, eps=1e-5)
    close(result, norm.add_rms_norm(x, other, weight, eps=1e-5))
    for bias in (None, other[0, 0]):
        result = loops_module.layer_norm(x, weight, bias, eps=1e-5)
        close(result, norm.layer_norm(x, weight, bias, eps=1e-5))


def test_a_rows_result_does_not_depend_on_the_others():
    x, weight = torch.randn(1, 8, 100), torch.randn(40, 100)
    compiled = torch.compile(linear, fullgraph=True, dynamic=False)
    together = compiled(x, weight)
    assert torch.equal(compiled(x[:, 3:4].contiguous(), weight), together[:, 3:4])
