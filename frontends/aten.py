"""How each ATen op of a trace is written in a program: fewer ops, explicit sizes, no views.

`torch.export` leaves some two hundred overloads: a dozen ways to reshape, cast, split or fill.
A lowering rewrites one of them with the calls that programs use (`CORE`). Lowerings are found by
overload in a table that the modules `aten_shapes` and `aten_math` fill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ..ir import Dim, UnsupportedError
from .builder import Builder
from .sizes import Sizes

A = torch.ops.aten


@dataclass
class Call:
    """One call of a trace. args, kwargs: already values of the program; fake: the traced result."""

    target: Any
    b: Builder
    sizes: Sizes
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fake: Any

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """An argument, by position or by name."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    def rank(self, index: int) -> int:
        """Number of dims of the tensor argument at `index`."""
        return len(self.b.shape(self.args[index]))

    @property
    def shape(self) -> list[Dim]:
        """Dims of the traced result."""
        return self.sizes.shape(self.fake)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the traced result."""
        dtype: torch.dtype = self.fake.dtype
        return dtype


Lowering = Callable[[Call], Any]
LOWERINGS: dict[Any, Lowering] = {}


def lowers(*overloads: Any) -> Callable[[Lowering], Lowering]:
    """Decorator: the function lowers calls of these overloads."""

    def register(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(overloads, function))
        return function

    return register


CORE = frozenset(
    {
        A._softmax.default,
        A._to_copy.default,
        A.abs.default,
        A.add.Tensor,
        A.amax.default,
        A.argmax.default,
        A.cat.default,
        A.clamp.default,
        A.clamp.Tensor,
        A.cos.default,
        A.cumsum.default,
        A.div.Tensor,
        A.div.Tensor_mode,
        A.embedding.default,
        A.eq.Scalar,
        A.eq.Tensor,
        A.erf.default,
        A.exp.default,
        A.expand.default,
        A.expm1.default,
        A.floor.default,
        A.full.default,
        A.gather.default,
        A.ge.Scalar,
        A.ge.Tensor,
        A.gelu.default,
        A.gt.Scalar,
        A.gt.Tensor,
        A.index.Tensor,
        A.layer_norm.default,
        A.le.Scalar,
        A.le.Tensor,
        A.linear.default,
        A.log.default,
        A.log1p.default,
        A.logical_and.default,
        A.logical_not.default,
        A.logical_or.default,
        A.lt.Scalar,
        A.lt.Tensor,
        A.masked_fill.Scalar,
        A.matmul.default,
        A.max.dim,
        A.maximum.default,
        A.mean.dim,
        A.minimum.default,
        A.mul.Tensor,
        A.ne.Scalar,
        A.ne.Tensor,
        A.neg.default,
        A.permute.default,
        A.pow.Scalar,
        A.pow.Tensor_Scalar,
        A.pow.Tensor_Tensor,
        A.reciprocal.default,
        A.relu.default,
        A.repeat.default,
        A.reshape.default,
        A.round.default,
        A.rsqrt.default,
        A.scatter.src,
        A.scatter.value,
        A.select.int,
        A.sigmoid.default,
        A.silu.default,
        A.sin.default,
        A.slice.Tensor,
        A.softplus.default,
        A.sort.default,
        A.sqrt.default,
        A.sub.Tensor,
        A.sum.dim_IntList,
        A.tanh.default,
        A.topk.default,
        A.unsqueeze.default,
        A.where.self,
    }
)
"""The ATen ops of traced programs; everything else is lowered to these or refused."""


TRANSIENT = frozenset(
    {
        A.arange.start_step,
        A.remainder.Scalar,
        A.remainder.Tensor,
        A.scaled_dot_product_attention.default,
        A.tril.default,
        A.triu.default,
    }
)
"""Ops that an import may pass through, of masks and positions, but not end with."""

COMPLEX = frozenset({A.polar.default, A.view_as_complex.default, A.view_as_real.default})
"""Ops that make or take complex values; see `complex_pairs`."""


def known(target: Any) -> bool:
    """Whether a call of this overload can stand in a program, as it is or lowered."""
    if target in LOWERINGS or target in CORE | TRANSIENT | COMPLEX:
        return True
    return getattr(target, "namespace", "") == "graftwork"


def lower(call: Call) -> Any:
    """The program's value for one call.

    An unknown op of ATen stands for itself: masks and positions may vanish later, and what stays is
    refused then. Errors: `UnsupportedError` naming an op from elsewhere.
    """
    if call.target in LOWERINGS:
        return LOWERINGS[call.target](call)
    if getattr(call.target, "namespace", "") in ("aten", "graftwork"):
        return call.b.call(call.target, *call.args, **call.kwargs)
    raise UnsupportedError(f"the op {call.target} is not supported yet")
