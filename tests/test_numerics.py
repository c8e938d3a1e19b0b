"""How quantized weights are stored: the bits, and what rounding makes of a weight."""

from __future__ import annotations

import pytest
import torch

from graftwork.ir import InputError, TensorType
from graftwork.ir.ops import numerics
from graftwork.ir.ops.numerics import WIDTHS, Numeric, dequantize, nearest, pack, unpack

F16, F32 = torch.float16, torch.float32
MIDDLE = ("symmetric", 1)
"""What has no middle to be symmetric around."""


def values(bits: int, *dims: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, dims, generator=torch.Generator().manual_seed(bits))


def stream(row: list[int], bits: int) -> list[int]:
    """The bytes of a bitstream, written down as one long number."""
    number = sum(value << (bits * place) for place, value in enumerate(row))
    return list(number.to_bytes(len(row) * bits // 8, "little"))


@pytest.mark.parametrize("bits", WIDTHS)
def test_values_are_a_dense_little_endian_bitstream(bits: int) -> None:
    given = values(bits, 3, 2, 40)
    packed = pack(given, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, 40 * bits // 8)
    assert packed[2, 1].tolist() == stream(given[2, 1].tolist(), bits)
    assert torch.equal(unpack(packed, bits), given.to(torch.int32))


@pytest.mark.parametrize(
    ("bits", "signed", "words"),
    [
        # What compressed-tensors 0.20 makes of these rows.
        (4, [-8, -7, 0, 7, 1, -1, 3, -5], [0x3B79F810]),
        (3, [-4, -3, -2, -1, 0, 1, 2, 3] * 4, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
    ],
)
def test_the_bits_are_those_of_compressed_tensors(
    bits: int, signed: list[int], words: list[int]
) -> None:
    packed = pack(torch.tensor([signed]) + 2 ** (bits - 1), bits)
    assert [word & 0xFFFFFFFF for word in packed.view(torch.int32)[0].tolist()] == words


def test_values_that_end_within_a_byte_are_refused() -> None:
    with pytest.raises(InputError, match="7 values of 3 bits fill no whole bytes"):
        pack(values(3, 7), 3)


@pytest.mark.parametrize("scale", [F32, F16])
@pytest.mark.parametrize(
    ("kind", "bits"), [(k, b) for k in ("symmetric", "affine") for b in WIDTHS if (k, b) != MIDDLE]
)
def test_every_value_is_the_nearest_that_its_group_has(bits, kind, scale) -> None:
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    weight[2, 16:32] = 0
    numeric = Numeric(bits, 16, kind, scale)
    stored = numeric.quantize(weight)
    assert (TensorType.of(stored.weight), TensorType.of(stored.scale)) == numeric.types(6, 48)
    assert (stored.offset is not None) == (kind == "affine")
    found = numeric.dequantize(stored)
    assert torch.equal(found[2, 16:32], torch.zeros(16))
    # All values that a group can have: each weight must be next to the one it became.
    every = torch.arange(2**bits)[:, None, None].float()
    step = stored.scale.float()
    if stored.offset is None:
        choices = (every - 2 ** (bits - 1)) * step
    else:
        choices = every * step + stored.offset.float()
    choices = choices.repeat_interleave(16, -1)
    best = (choices - weight).abs().amin(0)
    torch.testing.assert_close((found - weight).abs(), best, rtol=0, atol=1e-6)


def test_a_half_is_rounded_to_even_steps() -> None:
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.0, 1.49999994]])
    stored = Numeric(4, 8).quantize(weight)
    assert stored.scale.item() == 1
    assert unpack(stored.weight, 4).tolist() == [[8, 10, 10, 8, 6, 6, 15, 9]]
    affine = Numeric(4, 8, "affine").quantize(torch.tensor([[0, 15, 0.5, 1.5, 2.5, 3.5, 1, 2]]))
    assert unpack(affine.weight, 4).tolist() == [[0, 15, 0, 2, 2, 4, 1, 2]]


def test_a_codebook_takes_the_nearest_entry() -> None:
    codebook = torch.tensor([100.0, -127.0, 0.0, 20.0])
    weight = torch.tensor([[-1.27, 1.0, 0.1, 0.11]])
    numeric = Numeric(2, 4, "codebook")
    stored = numeric.quantize(weight, codebook)
    assert unpack(stored.weight, 2).tolist() == [[1, 0, 2, 3]]
    torch.testing.assert_close(
        numeric.dequantize(stored, codebook), torch.tensor([[-1.27, 1.0, 0.0, 0.2]])
    )
    assert nearest(torch.tensor([10.0]), codebook).tolist() == [2]  # half way: the smaller entry


def test_dequantizing_follows_the_formula() -> None:
    packed = pack(torch.tensor([[0, 1, 2, 15]]), 4)
    scale, offset = torch.tensor([[0.5, 2.0]]), torch.tensor([[1.0, -3.0]])
    assert dequantize(packed, scale, bits=4).tolist() == [[-4.0, -3.5, -12.0, 14.0]]
    assert dequantize(packed, scale, offset, bits=4).tolist() == [[1.0, 1.5, 1.0, 27.0]]


def test_sizes_count_everything_that_is_stored() -> None:
    weight = torch.randn(8, 64)
    for kind in ("symmetric", "affine"):
        numeric = Numeric(3, 32, kind, F16)
        parts = [part for part in numeric.quantize(weight) if part is not None]
        assert numeric.nbytes(8, 64) == sum(part.nbytes for part in parts)
    assert Numeric(4, 32, "codebook", F16).nbytes(8, 64) == 8 * 64 // 2 + 8 * 2 * 2 + 16 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((5, 32), "bits: expected one of 1, 2, 3, 4, 6, 8, got 5"),
        ((4, 0), "group: expected at least 1"),
        ((4, 32, "signed"), "kind: expected one of symmetric, affine, codebook, pairs, got signed"),
        ((4, 32, "affine", torch.bfloat16), "scale: expected torch.float32 or torch.float16"),
    ],
)
def test_formats_that_there_are_not(options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Numeric(*options)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(InputError, match=r"48 columns .* group of 32: choose a group of 16"):
        Numeric(4, 32).quantize(torch.randn(2, 48))
    with pytest.raises(InputError, match=r"choose one group a row \(30\)"):
        Numeric(4, 32).types(2, 30)
    with pytest.raises(InputError, match="12 columns of 3 bits fill no whole bytes: choose 8 bits"):
        Numeric(3, 12).types(2, 12)


def test_a_scale_that_is_too_large_for_f16_is_refused() -> None:
    with pytest.raises(InputError, match=r"f16 cannot hold .*store them as f32"):
        Numeric(4, 8, "affine", F16).quantize(torch.full((1, 8), 1e6))


@pytest.mark.parametrize("kind", ["symmetric", "affine", "codebook"])
def test_rows_that_are_quantized_some_at_a_time_have_the_same_bits(kind, monkeypatch) -> None:
    weight = torch.randn(11, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    book = torch.linspace(-1, 1, 16) if kind == "codebook" else None
    numeric = Numeric(4, 16, kind, torch.float16)
    whole = numeric.quantize(weight, book)
    monkeypatch.setattr(numerics, "AT_ONCE", 100)
    for one, other in zip(whole, numeric.quantize(weight, book), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
