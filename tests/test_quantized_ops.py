"""What products with quantized weights mean: against plain numbers, one by one."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import pytest
import torch

from graftwork.ir import InputError
from graftwork.ir.ops.numerics import WIDTHS, Numeric, unpack
from graftwork.ir.ops.quantized import (
    fused_multiply_add,
    quantized_embedding,
    quantized_linear,
    round_rows,
)

BOOK = {bits: torch.linspace(-127, 127, 2**bits).round() for bits in WIDTHS}
KINDS = ("symmetric", "affine", "codebook")
FORMATS = [(bits, kind) for bits in WIDTHS for kind in KINDS if (bits, kind) != (1, "symmetric")]


def random(*dims: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed))


def stored(
    weight: torch.Tensor, bits: int, group: int, kind: Any, scale: torch.dtype = torch.float32
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands of a weight by name, and the options of calls with it."""
    codebook = BOOK[bits] if kind == "codebook" else None
    found = Numeric(bits, group, kind, scale).quantize(weight, codebook)
    operands = {**found._asdict(), "codebook": codebook}
    return operands, {"bits": bits, "group": group}


@pytest.fixture(scope="module")
def fma() -> Any:
    """C's fmaf: a * b + c in float32, rounded once."""
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("no C mathematics library")
    function = ctypes.CDLL(name).fmaf
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return function


def test_sums_of_products_are_rounded_once(fma: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-30, 31, (3, 4000), generator=generator).float())
    a, b, c = torch.randn(3, 4000, generator=generator) * sizes
    # Sums that float64 rounds to half way between two float32, from above and below.
    step, tiny = 2.0**-24, 2.0**-70
    near = [(step, 1 + 2.0**-23, 1.0), (-step, 1 + 2.0**-23, 1.0), (step, 1.0, 1.0)]
    near += [(step * (1 + 2.0**-23), 1 - 2.0**-23, one) for one in (1.0, 1 + 2.0**-23, -1.0)]
    near += [(2.0**60 + 2.0**37, 2.0**-61, sign * 2.0**24) for sign in (1, -1)] + [(tiny, 1, step)]
    more = torch.tensor(near).T
    a, b, c = (torch.cat([x, y]) for x, y in zip((a, b, c), more, strict=True))
    want = [fma(*triple) for triple in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert torch.equal(fused_multiply_add(a, b, c), torch.tensor(want))
    # Adding in float64 and then rounding gets some of them wrong.
    twice = (a.double() * b.double() + c.double()).float()
    assert not torch.equal(twice, torch.tensor(want))


def by_hand(x: torch.Tensor, operands: dict[str, Any], bits: int, group: int, fma: Any) -> Any:
    """The rounded product of rows x [R,K], number by number."""
    values = unpack(operands["weight"], bits)
    offset, codebook = operands["offset"], operands["codebook"]
    rows = []
    for row in x:
        scale = torch.maximum(row.abs().max() / 127, torch.tensor(0.0))
        scale = scale if scale > 0 else torch.tensor(1.0)
        steps = [int(step) for step in torch.round(row / scale)]
        rows.append([])
        for n in range(len(values)):
            total = 0.0
            for g in range(operands["scale"].shape[1]):
                part = range(g * group, (g + 1) * group)
                stored = [int(values[n, k]) for k in part]
                if codebook is not None:
                    level = [int(codebook[q]) for q in stored]
                else:
                    level = [q - (0 if offset is not None else 2 ** (bits - 1)) for q in stored]
                summed = sum(steps[k] * level[i] for i, k in enumerate(part))
                total = fma(summed, float(operands["scale"][n, g]), total)
                if offset is not None:
                    total = fma(sum(steps[k] for k in part), float(offset[n, g]), total)
            rows[-1].append(total)
        rows[-1] = torch.tensor(rows[-1]) * scale
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("bits", "kind"), FORMATS)
def test_rounded_products_are_these_numbers(bits: int, kind: str, dtype, fma: Any) -> None:
    operands, options = stored(random(5, 48), bits, 16, kind, dtype)
    x = random(3, 48, seed=1)
    x[1] = 0
    found = quantized_linear(x, **operands, **options)
    assert torch.equal(found, by_hand(x, operands, bits, 16, fma))
    bias = random(5, seed=2)
    assert torch.equal(quantized_linear(x, **operands, bias=bias, **options), found + bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    operands, options = stored(random(24, 1536), 4, 32, kind)
    x = random(33, 1536, seed=1)
    together = quantized_linear(x, **operands, **options)
    for row in (0, 7, 32):
        assert torch.equal(
            quantized_linear(x[row : row + 1], **operands, **options)[0], together[row]
        )
    assert torch.equal(
        quantized_linear(x.view(3, 11, -1), **operands, **options)[1], together[11:22]
    )


@pytest.mark.parametrize(("bits", "kind"), FORMATS)
def test_what_is_not_rounded_is_the_product_with_the_values(bits: int, kind: Any) -> None:
    weight, x, bias = random(6, 64), random(2, 3, 64, seed=1), random(6, seed=2)
    operands, options = stored(weight, bits, 32, kind)
    numeric = Numeric(bits, 32, kind)
    values = numeric.dequantize(
        numeric.quantize(weight, operands["codebook"]), operands["codebook"]
    )
    found = quantized_linear(x, **operands, bias=bias, **options, rounded=False)
    torch.testing.assert_close(found, x @ values.T + bias, rtol=1e-5, atol=1e-5)
    rounded = quantized_linear(x, **operands, bias=bias, **options)
    assert 0 < (rounded - found).abs().max() < 0.03 * found.abs().max()


def test_eight_bits_with_a_scale_a_row() -> None:
    """The integer part is exact for wide layers; a row's result does not depend on its company."""
    weight, x = random(6, 3000), random(1, 8, 3000, seed=1)
    x[0, 3] = 0
    operands, options = stored(weight, 8, 3000, "symmetric")
    scale = weight.abs().amax(-1, keepdim=True) / 127
    values = torch.round(weight / scale)
    assert torch.equal(unpack(operands["weight"], 8) - 128, values.int())
    assert torch.equal(operands["scale"], scale)
    found = quantized_linear(x, **operands, **options)
    steps, rows = round_rows(x)
    exact = (steps.double() @ values.double().T) * rows.double() * scale[:, 0].double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    assert torch.equal(found[0, 3], torch.zeros(6))
    for index in range(8):
        alone = quantized_linear(x[:, index : index + 1], **operands, **options)
        assert torch.equal(alone[:, 0], found[:, index])
    error = (found - x @ weight.T).abs().max() / found.abs().max()
    assert 1e-5 < error < 0.03


def test_offsets_may_be_finer_than_scales() -> None:
    operands, options = stored(random(6, 64), 4, 32, "affine")
    x = random(2, 64, seed=1)
    mixed = {**operands, "scale": operands["scale"].half()}
    wide = {**mixed, "scale": mixed["scale"].float()}
    found = quantized_linear(x, **mixed, **options)
    assert torch.equal(found, quantized_linear(x, **wide, **options))


def test_a_half_is_rounded_to_even_steps() -> None:
    """Of a row whose step is 1: 0.5 becomes 0, 1.5 and 2.5 become 2, and the same below zero."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]])
    steps, scale = round_rows(x)
    assert scale.item() == 1 and steps.tolist() == [[127, 0, 2, 2, 0, -2, -2, 4]]


def test_half_precision_comes_and_goes() -> None:
    operands, options = stored(random(6, 64), 4, 32, "affine")
    x = random(2, 64, seed=1)
    found = quantized_linear(x.bfloat16(), **operands, **options)
    want = quantized_linear(x.bfloat16().float(), **operands, **options)
    assert found.dtype == torch.bfloat16 and torch.equal(found, want.bfloat16())


@pytest.mark.parametrize(("bits", "kind"), FORMATS)
def test_looking_up_gives_rows_of_the_values(bits: int, kind: Any) -> None:
    table = random(7, 32)
    operands, options = stored(table, bits, 16, kind, torch.float16)
    numeric = Numeric(bits, 16, kind, torch.float16)
    values = numeric.dequantize(numeric.quantize(table, operands["codebook"]), operands["codebook"])
    ids = torch.tensor([[6, 0], [3, 3]])
    assert torch.equal(quantized_embedding(ids, **operands, **options), values[ids])


REFUSED = {
    "bits: expected one of": {"bits": 5},
    "K=64 must be a multiple of group=48": {"group": 48},
    r"weight must be u8\[N,P\]": {"weight": torch.zeros(6, 31, dtype=torch.uint8)},
    "weight must be u8": {"weight": torch.zeros(6, 32)},
    r"scale must be f32\[N,G\]": {"scale": torch.ones(6, 3)},
    "offset must be f32": {"offset": torch.ones(6, 2, dtype=torch.float64)},
    r"codebook must be f32\[L\]": {"codebook": torch.ones(8), "offset": None},
    "an offset or a codebook, not both": {"codebook": torch.ones(16)},
    r"bias must be floating \[N\]|bias must be": {"bias": torch.ones(5)},
}


@pytest.mark.parametrize("message", REFUSED, ids=str)
def test_operands_that_do_not_fit_are_refused(message: str) -> None:
    operands, options = stored(random(6, 64), 4, 32, "affine")
    with pytest.raises(InputError, match=message):
        quantized_linear(random(2, 64), **{**operands, **options, **REFUSED[message]})


def test_tables_that_do_not_fit_are_refused() -> None:
    operands, options = stored(random(6, 64), 4, 32, "affine")
    ids = torch.tensor([1])
    with pytest.raises(InputError, match=r"weight must be u8\[N,P\], got u8\[6, 32\]; here K=96"):
        quantized_embedding(ids, **{**operands, "scale": torch.ones(6, 3)}, **options)
    with pytest.raises(InputError, match="offset must be f32"):
        quantized_embedding(ids, **{**operands, "offset": torch.ones(6, 3)}, **options)
    with pytest.raises(InputError, match="ids must be i64 or i32"):
        quantized_embedding(ids.float(), **operands, **options)
