"""Linear layers over quantized weights. Activation scales are per row: a token's result does not
depend on which other tokens share its step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import Sample, define

_EXACT = 1024
"""Products of int8 values stay below 2^14, so float32 (24 bits) sums this many of them exactly."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 values, float32 scale [..., 1]) with x ~ values * scale, over the last axis.

    Symmetric, -127..127, half to even; a row of zeros has scale 1.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127.0
    scale = torch.where(scale > 0, scale, 1.0)
    return torch.round(wide / scale).to(torch.int8), scale


def _samples() -> Iterator[Sample]:
    weight = torch.randint(-127, 128, (6, 8), dtype=torch.int8)
    yield (torch.randn(2, 3, 8), weight, torch.rand(6)), {}
    yield (torch.zeros(1, 1, 8), weight, torch.rand(6), torch.randn(6)), {}
    wide = torch.randint(-127, 128, (4, 2600), dtype=torch.int8)
    yield (torch.randn(1, 2, 2600), wide, torch.rand(4)), {}


def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@define(
    "linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor",
    samples=_samples,
    fake=_fake,
)
def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer computed in int8: quantize each row of x, multiply exactly, scale back.

    ``%y: f32[B,T,N] = graftwork.linear_int8(%x, @w.int8, @w.scale)``

    x [..., K] floating; weight i8[N,K] in -127..127; scale f32[N], one an output channel; bias [N].
    Row r: s = max|x_r| / 127,
    y = (sum_k round(x_rk / s) weight_nk) * s * scale_n + bias_n, the sum exact.
    Source: Dettmers et al., "LLM.int8()" (2022), vector-wise quantization without its outliers.
    """
    values, row_scale = quantize_rows(x)
    total = torch.zeros((), dtype=torch.int32, device=x.device)
    for start in range(0, weight.shape[1], _EXACT):
        part = values[..., start : start + _EXACT].float()
        columns = weight[:, start : start + _EXACT].float()
        total = total + torch.nn.functional.linear(part, columns).to(torch.int32)
    result = total.float() * row_scale * scale.float()
    return (result if bias is None else result + bias.float()).to(x.dtype)
