"""Rows of products with weights and between activations, and of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as oir
import torch

from ...ir import TensorType, Weight, derive
from .emit import Emitter, row, type_of, weight_of
from .rows_elementwise import operand

A = torch.ops.aten


def transposed(weight: Weight) -> Weight:
    """A weight [N,K] as [K,N], the layout that MatMul streams through; made when it is loaded."""
    rows, columns = weight.type.dims
    turned = TensorType(weight.type.dtype, (columns, rows))
    return derive(f"{weight.name}.kn", turned, A.t.default, weight)


def linear_product(e: Emitter, x: oir.Value, w: oir.Value) -> Any:
    """x [...,K] times the transpose of w [N,K]."""
    weight = weight_of(w)
    if weight is None:
        return e.op("MatMul", x, e.op("Transpose", w, perm=[1, 0]))
    if weight.name in e.looked_up:
        # An embedding table that is also the head: one copy on disk serves both.
        if not e.contrib:
            return e.op("MatMul", x, e.op("Transpose", w, perm=[1, 0]))
        return e.fused("FusedMatMul", x, w, transB=1)
    return e.op("MatMul", x, e.weight(transposed(weight)))


@row(A.linear.default)
def linear(e: Emitter, x: oir.Value, w: oir.Value, bias: oir.Value | None = None) -> Any:
    is_vector = len(type_of(w).dims) == 1
    product = e.op("MatMul", x, w) if is_vector else linear_product(e, x, w)
    return product if bias is None else e.op("Add", product, bias)


@row(A.matmul.default, A.mm.default, A.bmm.default, A.mv.default)
def matmul(e: Emitter, a: oir.Value, b: oir.Value) -> Any:
    return e.op("MatMul", a, b)


@row(A.addmm.default, A.baddbmm.default)
def addmm(
    e: Emitter, bias: oir.Value, a: oir.Value, b: oir.Value, beta: Any = 1, alpha: Any = 1
) -> Any:
    product = e.op("MatMul", a, b)
    if alpha != 1:
        product = e.op("Mul", product, operand(e, alpha, e.dtype()))
    if beta == 0:
        return product
    if beta != 1:
        bias = e.op("Mul", bias, operand(e, beta, e.dtype()))
    return e.op("Add", product, bias)


@row(A.conv1d.default)
def conv1d(
    e: Emitter,
    x: oir.Value,
    w: oir.Value,
    bias: oir.Value | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    return e.op(
        "Conv",
        x,
        w,
        bias,
        strides=list(stride),
        pads=list(padding) * 2,
        dilations=list(dilation),
        group=groups,
    )
