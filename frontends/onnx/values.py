"""What values of an ONNX graph are while it is interpreted in torch.

A tensor of the trace is a `torch.Tensor`. Everything that is known beforehand is something else, so
that shapes are computed with sizes and not with tensors: exporters write a reshape to [B,T,H] as a
dozen nodes on small integer tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...ir import UnsupportedError

Number: TypeAlias = Any
"""An int, a float, a bool, or a size of the trace."""


@dataclass(frozen=True)
class Numbers:
    """A tensor without axes, or of one, whose values are known: `items`."""

    items: tuple[Number, ...]
    scalar: bool = False

    @property
    def one(self) -> Number:
        """The only value. Errors: `UnsupportedError` if there are several."""
        if len(self.items) != 1:
            raise UnsupportedError(f"expected one number, got {len(self.items)}")
        return self.items[0]


@dataclass(frozen=True)
class Parameter:
    """A weight of the model. name: that of the module's parameter. tensor: it, without data; [N,K]
    if `turned`, where the graph has [K,N]."""

    name: str
    tensor: torch.Tensor
    turned: bool = False


@dataclass(frozen=True)
class EmptyPast:
    """A cache before the first token: [B,G,0,D]."""

    batch: Number
    groups: int
    width: int


@dataclass(frozen=True)
class AllTokens:
    """An attention mask [B,T] of ones: every token is one."""

    batch: Number
    tokens: Number


@dataclass(frozen=True)
class AsTheyStand:
    """Where in its text each token stands, i64[B,T]: an order that changes nothing."""

    batch: Number
    tokens: Number


@dataclass(frozen=True)
class IsNan:
    """Whether a value is NaN; where it is a softmax, it never is: some token is always seen."""

    value: torch.Tensor


@dataclass(frozen=True)
class Root:
    """The square root of a value; one over it is one op."""

    value: torch.Tensor


Value: TypeAlias = (
    torch.Tensor | Numbers | Parameter | EmptyPast | AllTokens | AsTheyStand | IsNan | Root | None
)


def tensor(value: Value) -> torch.Tensor:
    """A value as a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Parameter):
        return value.tensor.t() if value.turned else value.tensor
    if isinstance(value, Root):
        return value.value.sqrt()
    if isinstance(value, AllTokens):
        return torch.ones((value.batch, value.tokens), dtype=torch.int64)
    if isinstance(value, Numbers) and value.scalar:
        return torch.full((), value.one)
    if isinstance(value, Numbers):
        parts = [torch.full((1,), item) for item in value.items]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    raise UnsupportedError(f"a {type(value).__name__} is used where a tensor is needed")


def operand(value: Value) -> Any:
    """A value for elementwise ops: one known number as it is, else a tensor."""
    if isinstance(value, Numbers) and len(value.items) == 1:
        return value.one
    return tensor(value)


def numbers(value: Value) -> list[Number]:
    """Known numbers. Errors: `UnsupportedError` for values that only a run would know."""
    if not isinstance(value, Numbers):
        raise UnsupportedError("a shape, or another argument, depends on what tokens say")
    return list(value.items)


def dims(value: Value) -> Sequence[Number]:
    """The sizes of a value."""
    if isinstance(value, EmptyPast):
        return value.batch, value.groups, 0, value.width
    if isinstance(value, (AllTokens, AsTheyStand)):
        return value.batch, value.tokens
    if isinstance(value, Numbers):
        return () if value.scalar else (len(value.items),)
    return tensor(value).shape
