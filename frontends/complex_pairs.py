"""Complex numbers as pairs of real values, for models that turn channels by complex products.

DeepSeek-V2 and Llama 4 turn by ``view_as_real(view_as_complex(x) * polar(1, angle))``.
Programs have no complex dtype, so each complex value of a trace is kept as (real, imaginary).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ..ir import Dim, UnsupportedError
from .aten import A, Call


@dataclass(frozen=True)
class Pair:
    """The real and imaginary part of a complex value, each a node of the program."""

    real: torch.fx.Node
    imag: torch.fx.Node


def involves_complex(call: Call) -> bool:
    """Whether the call reads or makes a complex value."""
    if any(isinstance(arg, Pair) for arg in call.args):
        return True
    return isinstance(call.fake, torch.Tensor) and call.fake.is_complex()


def lower_complex(c: Call) -> Any:
    """The pair (or, for `view_as_real`, the node) of a call. Errors: `UnsupportedError`."""
    b, first = c.b, c.args[0]
    if c.target is A.polar.default:
        cos, sin = b.call(A.cos.default, c.args[1]), b.call(A.sin.default, c.args[1])
        return Pair(b.call(A.mul.Tensor, first, cos), b.call(A.mul.Tensor, first, sin))
    if c.target is A.view_as_complex.default:
        return Pair(b.call(A.select.int, first, -1, 0), b.call(A.select.int, first, -1, 1))
    if c.target is A.view_as_real.default:
        return b.stack([first.real, first.imag], len(b.shape(first.real)))
    if c.target is A.mul.Tensor:
        return _multiply(c)
    if c.target in _SHAPE_OPS:
        return Pair(_reshaped(c, first.real), _reshaped(c, first.imag))
    raise UnsupportedError(f"the op {c.target} on complex numbers is not supported yet")


_SHAPE_OPS = frozenset(
    {
        A.view.default,
        A.reshape.default,
        A.unsqueeze.default,
        A.contiguous.default,
        A.to.device,
        A.to.dtype,
        A.to.dtype_layout,
        A._to_copy.default,
        A.clone.default,
        A.alias.default,
        A.slice.Tensor,
        A.expand.default,
    }
)


def _reshaped(c: Call, part: torch.fx.Node) -> torch.fx.Node:
    shape: list[Dim] = c.shape
    if c.target is A.expand.default:
        return c.b.expand(part, shape)
    if c.target is A.slice.Tensor and c.b.shape(part) != shape:
        raise UnsupportedError("slicing complex numbers is not supported yet")
    return c.b.reshape(part, shape)


def _multiply(c: Call) -> Pair:
    left, right = c.args[0], c.args[1]
    if not isinstance(left, Pair):
        left, right = right, left
    times = A.mul.Tensor
    if not isinstance(right, Pair):
        return Pair(c.b.call(times, left.real, right), c.b.call(times, left.imag, right))
    real = c.b.call(
        A.sub.Tensor,
        c.b.call(times, left.real, right.real),
        c.b.call(times, left.imag, right.imag),
    )
    imag = c.b.call(
        A.add.Tensor,
        c.b.call(times, left.imag, right.real),
        c.b.call(times, left.real, right.imag),
    )
    return Pair(real, imag)
