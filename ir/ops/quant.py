"""Linear layers over quantized weights. Activation scales are per row: a token's result does not
depend on which other tokens share its step (unless a layer is called coarse)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import InputError
from . import Product, Sample, define
from .operands import Operands

_EXACT = 512
"""Products of an activation below 2^8 and a weight below 2^7 stay below 2^15, so float32 (24 bits)
sums this many of them exactly."""


COARSE = 63
"""The largest of 7-bit weights: two products with an activation below 2^8 add up in 16 bits, which
is how processors without dot-product instructions add them."""


def round_rows(x: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    """(whole float32 values, float32 scale [..., 1]) with x ~ values * scale, over the last axis.

    Symmetric, -most..most, half to even; a row of zeros has scale 1, one that is not finite NaN, so
    that what is made of it is NaN, too, and not what whole numbers become of it.
    """
    wide = x.float()
    scale = _finite(wide.abs().amax(-1, keepdim=True) / float(most))
    return torch.round(wide / scale), scale


def _finite(scale: Tensor) -> Tensor:
    """1 for 0, and NaN for what is not finite."""
    return torch.where(scale == 0, 1.0, scale + (scale - scale))


def quantize_rows(x: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    """`round_rows` with int8 values."""
    values, scale = round_rows(x, most)
    return values.to(torch.int8), scale


def quantize_tensor(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(whole values in 0..255, zero point [], float32 scale []), x ~ (values - zero) * scale.

    256 steps from the smallest value, or 0, to the largest, or 0; half to even. ONNX's
    DynamicQuantizeLinear.
    """
    wide = x.float()
    low, high = wide.amin().clamp(max=0), wide.amax().clamp(min=0)
    scale = _finite((high - low) / 255.0)
    zero = torch.round(-low / scale).clamp(0, 255)
    return (torch.round(wide / scale) + zero).clamp(0, 255), zero, scale


def _samples() -> Iterator[Sample]:
    weight = torch.randint(-127, 128, (6, 8), dtype=torch.int8)
    yield (torch.randn(2, 3, 8), weight, torch.rand(6)), {}
    yield (torch.zeros(1, 1, 8), weight, torch.rand(6), torch.randn(6)), {}
    wide = torch.randint(-127, 128, (4, 2600), dtype=torch.int8)
    yield (torch.randn(1, 2, 2600), wide, torch.rand(4)), {}
    small = torch.randint(-COARSE, COARSE + 1, (6, 8), dtype=torch.int8)
    yield (torch.randn(2, 3, 8), small, torch.rand(6), torch.randn(6)), {"coarse": True}
    yield (torch.rand(1, 1, 8) + 1, small, torch.rand(6)), {"coarse": True}


def check_linear_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, coarse: bool
) -> None:
    """Whether `linear_int8` takes these operands. Errors: `InputError` naming what does not fit."""
    given = Operands("linear_int8")
    given.fit_rows("x", x, "K")
    given.fit("weight", weight, "NK", torch.int8)
    given.fit("scale", scale, "N")
    given.fit("bias", bias, "N")
    given.at_least_one("K")
    if coarse and x.numel() == 0:
        raise InputError("linear_int8: a coarse layer of no rows has no scale")


def _fake(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, coarse: bool = False
) -> Tensor:
    check_linear_int8(x, weight, scale, bias, coarse)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@define(
    "linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None, *, bool coarse=False) "
    "-> Tensor",
    samples=_samples,
    fake=_fake,
    product=Product(
        ("weight", "scale", "bias"), inner=2, exact=lambda options: not options.get("coarse")
    ),
)
def linear_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, coarse: bool = False
) -> Tensor:
    """A linear layer computed in int8: quantize each row of x, multiply exactly, scale back.

    ``%y: f32[B,T,N] = graftwork.linear_int8(%x, @w.int8, @w.scale)``

    x [..., K] floating; weight i8[N,K] in -127..127; scale f32[N], one an output channel; bias [N].
    Row r: s = max|x_r| / 127,
    y = (sum_k round(x_rk / s) weight_nk) * s * scale_n + bias_n, the sum exact. coarse: what
    runs fastest: weight in -63..63, one scale and zero point for all rows (see `quantize_tensor`).
    Source: Dettmers et al., "LLM.int8()" (2022), vector-wise quantization without its outliers.
    Errors: `InputError` naming an operand of another rank, size or dtype.
    """
    check_linear_int8(x, weight, scale, bias, coarse)
    if coarse:
        steps, zero, row_scale = quantize_tensor(x)
        values = steps - zero
    else:
        values, row_scale = round_rows(x)
    total = torch.zeros((), dtype=torch.int32, device=x.device)
    for start in range(0, weight.shape[1], _EXACT):
        part = values[..., start : start + _EXACT]
        columns = weight[:, start : start + _EXACT].float()
        total = total + torch.nn.functional.linear(part, columns).to(torch.int32)
    result = total.float() * row_scale * scale.float()
    return (result if bias is None else result + bias.float()).to(x.dtype)
