"""The elementwise middle of a gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..errors import InputError
from . import Sample, define

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "sigmoid": torch.sigmoid,
}


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply a named activation. Errors: `InputError` listing the known names."""
    _known(activation)
    return ACTIVATIONS[activation](x)


def _known(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise InputError(f"unknown activation {activation!r}; expected one of {list(ACTIVATIONS)}")


def _samples() -> Iterator[Sample]:
    for activation in ACTIVATIONS:
        yield (torch.randn(2, 3, 8), torch.randn(2, 3, 8)), {"activation": activation}


def _type(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    _known(activation)
    if gate.shape != up.shape:
        raise InputError(f"gate {list(gate.shape)} and up {list(up.shape)} must be of one shape")
    if not (gate.is_floating_point() and up.is_floating_point()):
        raise InputError(f"gate and up must be floating, got {gate.dtype} and {up.dtype}")
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)


@define("glu(Tensor gate, Tensor up, *, str activation) -> Tensor", samples=_samples, fake=_type)
def glu(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * up.

    ``%y: f32[B,T,F] = graftwork.glu(%gate, %up, activation="silu")``

    gate, up of one shape; activation: silu, gelu, gelu_tanh, relu or sigmoid.
    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    _type(gate, up, activation=activation)
    return activate(gate, activation) * up
