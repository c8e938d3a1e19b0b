"""Normalisations. Statistics are taken in float32 over the last axis, whatever the input dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .operands import Operands


def _check(given: Operands) -> None:
    if given.sizes["W"] not in (1, given.sizes["H"]):
        raise InputError(f"{given.op}: weight must be [H], or [1]; {given.known()}")


def _rms_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8), torch.rand(8)), {"eps": 1e-6}
    yield (torch.randn(2, 3, 8).bfloat16(), torch.rand(8).bfloat16()), {"eps": 1e-5}


@op("x: ...H, weight: W -> x", samples=_rms_samples, also=_check)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in float32, back in x's dtype.

    ``%y: f32[B,T,H] = graftwork.rms_norm(%x, @norm.weight, eps=1e-06)``

    x [..., H]; weight [H], or [1] for all of them.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    return _normed(x, weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def _add_rms_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.rand(8)), {"eps": 1e-6}


@op("x: ...H, residual: x, weight: W -> x, x", samples=_add_rms_samples, also=_check)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), fused.

    ``%r: (f32[B,T,H], f32[B,T,H]) = graftwork.add_rms_norm(%x, %res, @norm.weight, eps=1e-06)``

    x, residual [..., H] of one shape; weight [H], or [1] for all of them.
    """
    total = x + residual
    return _normed(total, weight, eps), total


def _layer_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8), torch.rand(8), torch.randn(8)), {"eps": 1e-5}
    yield (torch.randn(2, 3, 8), torch.rand(8), None), {"eps": 1e-5}


@op("x: ...H, weight: H, bias: H -> x", samples=_layer_samples)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, in float32, back in x's dtype.

    ``%y: f32[B,T,H] = graftwork.layer_norm(%x, @ln.weight, @ln.bias, eps=1e-05)``

    x [..., H]; weight, bias [H]. Source: Ba et al., "Layer Normalization" (2016).
    """
    wide_bias = None if bias is None else bias.float()
    shape = (x.shape[-1],)
    wide = torch.nn.functional.layer_norm(x.float(), shape, weight.float(), wide_bias, eps)
    return wide.to(x.dtype, copy=True)
