"""The elementwise middle of a gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .operands import Operands

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "sigmoid": torch.sigmoid,
}


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply a named activation. Errors: `InputError` listing the known names."""
    check_activation(activation)
    return ACTIVATIONS[activation](x)


def check_activation(activation: str) -> None:
    """Errors: `InputError` for a name that is none of `ACTIVATIONS`."""
    if activation not in ACTIVATIONS:
        raise InputError(f"unknown activation {activation!r}; expected one of {list(ACTIVATIONS)}")


def _samples() -> Iterator[Sample]:
    for activation in ACTIVATIONS:
        yield (torch.randn(2, 3, 8), torch.randn(2, 3, 8)), {"activation": activation}


def _check(given: Operands, activation: str) -> None:
    check_activation(activation)


@op("gate: ...F, up: float gate -> gate+up gate", samples=_samples, also=_check)
def glu(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * up.

    ``%y: f32[B,T,F] = graftwork.glu(%gate, %up, activation="silu")``

    gate, up of one shape; activation: silu, gelu, gelu_tanh, relu or sigmoid.
    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    return activate(gate, activation) * up
