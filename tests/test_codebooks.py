"""Weights of codebooks for runs of outputs, of values in pairs, and of one bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftwork.backends import tiles
from graftwork.backends.torch import native_quantized as native
from graftwork.ir import InputError
from graftwork.ir.ops.numerics import Numeric, Quantized, pack
from graftwork.ir.ops.quantized import quantized_linear

everywhere = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def stored(seed: int, numeric: Numeric, outputs: int, groups: int) -> Quantized:
    """A random weight of a codebook of whole numbers."""
    random = torch.Generator().manual_seed(seed)
    columns = numeric.group * groups
    q = torch.randint(0, 2**numeric.bits, (outputs, columns), generator=random)
    scale = torch.rand(outputs, groups, generator=random) + 0.5
    several = () if numeric.books == 1 else (numeric.books,)
    book = torch.randint(-127, 128, (*several, numeric.entries), generator=random).float()
    return Quantized(pack(q, numeric.bits), scale.to(numeric.scale), None, book)


def test_a_value_beside_a_mark_is_looked_up_in_the_second_half():
    """By hand: of each pair the one that is a mark is nothing, and its neighbour stands alone."""
    numeric = Numeric(4, 4, "pairs")
    book = torch.tensor([*range(8), 0.0, *range(-7, 0), *(100.0 + i for i in range(16))])
    q = torch.tensor([[3, 15, 8, 2], [5, 8, 8, 8]])
    weight = Quantized(pack(q, 4), torch.tensor([[2.0], [1.0]]), None, book)
    # [3, -1] stand for themselves; beside the mark 8 codes 2 and 5 are of the other half.
    want = [[6.0, -2.0, 0.0, 204.0], [105.0, 0.0, 108.0, 108.0]]
    assert numeric.dequantize(weight).tolist() == want


def test_each_run_of_outputs_has_its_own_codebook():
    numeric = Numeric(1, 8, "codebook", books=2)
    book = torch.tensor([[1.0, 2.0], [30.0, 40.0]])
    q = torch.tensor([[0, 1, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0]])
    weight = Quantized(pack(q, 1), torch.tensor([[1.0], [0.5]]), None, book)
    assert numeric.dequantize(weight)[:, :2].tolist() == [[1.0, 2.0], [20.0, 15.0]]
    assert numeric.nbytes(2, 8) == 2 * 1 + 2 * 4 + 4 * 4


@pytest.mark.parametrize(
    ("numeric", "reason"),
    [
        ({"bits": 3, "group": 8, "kind": "pairs"}, "4 bits"),
        ({"bits": 4, "group": 3, "kind": "pairs"}, "groups of pairs"),
        ({"bits": 6, "group": 8, "kind": "codebook", "books": 2}, "books"),
        ({"bits": 4, "group": 8, "books": 2}, "books"),
        ({"bits": 1, "group": 8}, "no middle"),
    ],
)
def test_formats_that_nothing_reads_are_refused(numeric, reason):
    with pytest.raises(InputError, match=reason):
        Numeric(**numeric)


FORMATS = st.sampled_from(
    [
        Numeric(4, 8, "pairs"),
        Numeric(4, 20, "pairs", torch.float16),
        Numeric(4, 32, "pairs", books=2),
        *(Numeric(bits, group, "codebook", books=2) for bits in (1, 2, 3, 4) for group in (8, 40)),
    ]
)


@everywhere
@given(st.integers(0, 99), FORMATS, st.integers(1, 3), st.sampled_from((1, 2, 5, 8, 9, 16)))
def test_kernels_have_the_bits_of_the_meaning(processor, seed, numeric, groups, count):
    weight = stored(seed, numeric, 64 if numeric.books > 1 else 37, groups)
    book = weight.codebook
    x = torch.randn(count, numeric.group * groups)
    how = {"bits": numeric.bits, "group": numeric.group}
    packed, scale = tiles.tile_values(weight.weight, **how), tiles.tile_columns(weight.scale)
    sizes = numeric.bits, numeric.group, len(weight.weight)
    found = native.quantized_linear(
        x, packed, scale, None, tiles.tile_table(book, bits=numeric.bits), None, *sizes
    )
    assert torch.equal(found, quantized_linear(x, *weight, None, **how))
    floats = native.float_linear(x, packed, scale, None, book, None, *sizes)
    want = x.double() @ numeric.dequantize(weight).double().T
    size = x.double().abs() @ numeric.dequantize(weight).double().abs().T
    assert ((floats - want).abs() <= 2e-6 * size).all()


def test_kernels_refuse_codebooks_of_parts_of_tiles():
    with pytest.raises(InputError, match="whole tiles"):
        tiles.check_books(2, 48)
    with pytest.raises(InputError, match="no runs of 3"):
        weight = stored(0, Numeric(4, 8, "codebook", books=3), 32, 1)
        quantized_linear(torch.zeros(1, 8), *weight, None, bits=4, group=8)
