"""Linear layers as loops: few rows, packed weights, the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graftwork.backends.torch.loops import WIDEST, linear, linear_packed, pack
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
@pytest.mark.parametrize("columns", [8, 512, 1300, 2816])
@pytest.mark.parametrize("rows", [(1, 1), (1, 3), (2, 4), (1, 9), (3, 7), (1, WIDEST + 1)])
def test_packed_weights_give_the_same_bits(rows, columns, coarse):
    x, weight, scale = int8_case(rows, columns, 63 if coarse else 127)
    bias = torch.arange(40.0)
    want = linear_int8(x, weight, scale, bias, coarse=coarse)
    words = pack(weight, coarse)
    assert torch.equal(linear_packed(x, words, scale, bias, coarse=coarse), want)
    assert torch.equal(linear_packed(x, weight, scale, bias, coarse=coarse), want)


def test_packed_weights_take_a_byte_each():
    weight = torch.zeros(64, 2816, dtype=torch.int8)
    assert pack(weight, coarse=False).nbytes == weight.nbytes


@pytest.mark.parametrize("rows", [9, WIDEST + 1])
def test_compiled_loops_give_the_same_bits(rows):
    x, weight, scale = int8_case((1, rows), 1300, 127)
    compiled = torch.compile(linear_packed, fullgraph=True)
    assert torch.equal(compiled(x, pack(weight, False), scale), linear_int8(x, weight, scale))


@pytest.mark.parametrize("rows", [(1, 1), (2, 4), (1, 9), (1, WIDEST + 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_loops_are_a_linear_layer(rows, dtype):
    x, weight = torch.randn(*rows, 100).to(dtype), torch.randn(40, 100).to(dtype)
    bias = torch.randn(40).to(dtype)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


def test_a_rows_result_does_not_depend_on_the_others():
    x, weight = torch.randn(1, 8, 100), torch.randn(40, 100)
    compiled = torch.compile(linear, fullgraph=True, dynamic=False)
    together = compiled(x, weight)
    assert torch.equal(compiled(x[:, 3:4].contiguous(), weight), together[:, 3:4])
