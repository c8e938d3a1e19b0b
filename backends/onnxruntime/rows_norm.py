"""Rows of normalisations and of the gated feed-forward middle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as oir
import torch

from ...ir import type_of as type_of_node
from . import ops  # noqa: F401  (defines ort_add_layer_norm)
from .emit import Emitter, row, type_of
from .rows_elementwise import silu

A = torch.ops.aten
G = torch.ops.graftwork

STATISTICS = (1, 2)
"""Outputs of fused sums and norms that training needs: means and inverse deviations."""


def _ones(e: Emitter, x: oir.Value) -> oir.Value:
    return e.const(torch.ones(int(str(type_of(x).dims[-1]))), type_of(x).dtype)


@row(G.rms_norm.default)
def rms_norm(e: Emitter, x: oir.Value, weight: oir.Value, eps: float) -> Any:
    return _rms_norm(e, x, e.cast(weight, e.dtype()), eps)


def _rms_norm(e: Emitter, x: oir.Value, scale: oir.Value, eps: float) -> Any:
    # The same op in ONNX Runtime, whose own name for it all its devices know.
    name = "RMSNormalization" if e.standard else "SimplifiedLayerNormalization"
    return e.op(name, x, scale, axis=-1, epsilon=eps, stash_type=1)


def _last_axis_only(node: Any) -> bool:
    return len(node.args[1]) == 1


@row(A.rms_norm.default, when=_last_axis_only)
def aten_rms_norm(
    e: Emitter, x: oir.Value, shape: Any, weight: oir.Value | None = None, eps: Any = None
) -> Any:
    scale = _ones(e, x) if weight is None else weight
    small = torch.finfo(e.dtype()).eps if eps is None else eps
    return _rms_norm(e, x, scale, small)


def _is_fusible(node: Any) -> bool:
    """Whether the kernel's shapes are given: three axes, nothing broadcast."""
    x, residual, weight = (type_of_node(operand).dims for operand in node.args[:3])
    return len(x) == 3 and x == residual and weight == x[-1:]


@row(G.add_rms_norm.default, when=_is_fusible)
def add_rms_norm(
    e: Emitter, x: oir.Value, residual: oir.Value, weight: oir.Value, eps: float
) -> Any:
    scale = e.cast(weight, e.dtype())
    if not e.contrib:
        total = e.op("Add", x, residual)
        return _rms_norm(e, total, scale, eps), total
    return _after_sum(e, "SkipSimplifiedLayerNormalization", x, residual, scale, eps=eps)


def _after_sum(e: Emitter, name: str, *given: oir.Value | None, eps: float) -> Any:
    """The normalised sum and the sum, by a kernel of both."""
    normed, _, _, total = e.fused(name, *given, epsilon=eps, outputs=4, unwanted=STATISTICS)
    return normed, total


@row(G.layer_norm.default)
def layer_norm(
    e: Emitter, x: oir.Value, weight: oir.Value, bias: oir.Value | None, eps: float
) -> Any:
    scale = e.cast(weight, e.dtype())
    shift = None if bias is None else e.cast(bias, e.dtype())
    return e.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=eps)


@row(A.layer_norm.default)
def aten_layer_norm(
    e: Emitter,
    x: oir.Value,
    shape: Sequence[int],
    weight: oir.Value | None = None,
    bias: oir.Value | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    scale = weight if weight is not None else e.const(torch.ones(list(shape)), e.dtype())
    return e.op("LayerNormalization", x, scale, bias, axis=-len(shape), epsilon=eps)


@row(A.group_norm.default)
def group_norm(
    e: Emitter,
    x: oir.Value,
    groups: int,
    weight: oir.Value | None = None,
    bias: oir.Value | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    channels = int(str(type_of(x).dims[1]))
    scale = weight if weight is not None else e.const(torch.ones(channels), e.dtype())
    shift = bias if bias is not None else e.const(torch.zeros(channels), e.dtype())
    return e.op("GroupNormalization", x, scale, shift, num_groups=groups, epsilon=eps)


def activated(e: Emitter, x: oir.Value, activation: str) -> Any:
    """A named activation of `ir.ops.mlp`."""
    if activation == "silu":
        return silu(e, x)
    if activation in ("gelu", "gelu_tanh"):
        return e.op("Gelu", x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return e.op({"relu": "Relu", "sigmoid": "Sigmoid"}[activation], x)


@row(G.glu.default)
def glu(e: Emitter, gate: oir.Value, up: oir.Value, activation: str) -> Any:
    return e.op("Mul", activated(e, gate, activation), up)


@row(G.ort_add_layer_norm.default)
def add_layer_norm(
    e: Emitter,
    x: oir.Value,
    residual: oir.Value,
    weight: oir.Value,
    bias: oir.Value | None,
    eps: float,
) -> Any:
    scale = e.cast(weight, e.dtype())
    shift = None if bias is None else e.cast(bias, e.dtype())
    return _after_sum(e, "SkipLayerNormalization", x, residual, scale, shift, eps=eps)
