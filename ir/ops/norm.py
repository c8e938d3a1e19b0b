"""Normalisations. Statistics are taken in float32 over the last axis, whatever the input dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import InputError
from . import Sample, define


def _result(x: Tensor, weight: Tensor, *, one_for_all: bool = False) -> Tensor:
    """What a norm of x gives: it has x's type."""
    if list(weight.shape) != [x.shape[-1]] and not (one_for_all and list(weight.shape) == [1]):
        or_one = ", or [1]," if one_for_all else ""
        raise InputError(f"weight must be [{x.shape[-1]}]{or_one} for x of {list(x.shape)}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rms_type(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return _result(x, weight, one_for_all=True)


def _add_rms_type(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise InputError(
            f"x {list(x.shape)} and residual {list(residual.shape)} must be of one type"
        )
    total = _result(x, weight, one_for_all=True)
    return total, torch.empty_like(total)


def _layer_type(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return _result(x, weight) if bias is None else _result(_result(x, weight), bias)


def _rms_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8), torch.rand(8)), {"eps": 1e-6}
    yield (torch.randn(2, 3, 8).bfloat16(), torch.rand(8).bfloat16()), {"eps": 1e-5}


@define(
    "rms_norm(Tensor x, Tensor weight, *, float eps) -> Tensor",
    samples=_rms_samples,
    fake=_rms_type,
)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in float32, back in x's dtype.

    ``%y: f32[B,T,H] = graftwork.rms_norm(%x, @norm.weight, eps=1e-06)``

    x [..., H]; weight [H], or [1] for all of them.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    _rms_type(x, weight, eps=eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def _add_rms_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.rand(8)), {"eps": 1e-6}


@define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, *, float eps) -> (Tensor, Tensor)",
    samples=_add_rms_samples,
    fake=_add_rms_type,
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): one trip through memory for a block's boundary.

    ``%r: (f32[B,T,H], f32[B,T,H]) = graftwork.add_rms_norm(%x, %res, @norm.weight, eps=1e-06)``

    x, residual [..., H] of one shape; weight [H], or [1] for all of them.
    """
    _add_rms_type(x, residual, weight, eps=eps)
    total = x + residual
    return rms_norm(total, weight, eps=eps), total


def _layer_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 3, 8), torch.rand(8), torch.randn(8)), {"eps": 1e-5}
    yield (torch.randn(2, 3, 8), torch.rand(8), None), {"eps": 1e-5}


@define(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, *, float eps) -> Tensor",
    samples=_layer_samples,
    fake=_layer_type,
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, in float32, back in x's dtype.

    ``%y: f32[B,T,H] = graftwork.layer_norm(%x, @ln.weight, @ln.bias, eps=1e-05)``

    x [..., H]; weight, bias [H]. Source: Ba et al., "Layer Normalization" (2016).
    """
    _layer_type(x, weight, bias, eps=eps)
    wide_bias = None if bias is None else bias.float()
    shape = (x.shape[-1],)
    wide = torch.nn.functional.layer_norm(x.float(), shape, weight.float(), wide_bias, eps)
    return wide.to(x.dtype, copy=True)
