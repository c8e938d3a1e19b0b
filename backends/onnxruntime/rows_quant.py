"""Rows of linear layers over quantized weights.

The activations are quantized by row in plain ops, each exactly as the op's meaning says, so a
token's result does not depend on what shares its step. A coarse layer is one kernel. The integer
product runs on unsigned activations, for which kernels exist.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as oir
import torch

from ...ir import TensorType, Weight, derive
from .emit import Emitter, row, type_of, weight_of
from .probe import signed_weights_are_exact

G = torch.ops.graftwork
F32, U8, I8 = torch.float32, torch.uint8, torch.int8
ZERO = 128
"""What stands for 0 in unsigned bytes."""


def _columns(weight: Weight, signed: bool) -> Weight:
    """i8[N,K] as [K,N], in bytes of the sign that the kernel wants."""
    rows, columns = weight.type.dims
    if signed:
        turned = TensorType(I8, (columns, rows))
        return derive(f"{weight.name}.kn", turned, lambda w: w.T, weight)
    turned = TensorType(U8, (columns, rows))
    return derive(f"{weight.name}.kn.u8", turned, _unsigned, weight)


def _unsigned(w: torch.Tensor) -> torch.Tensor:
    return (w.T.to(torch.int16) + ZERO).to(U8)


def _turned(e: Emitter, w: oir.Value, signed: bool) -> Any:
    """The same for a weight that the program computes."""
    turned = e.op("Transpose", w, perm=[1, 0])
    if signed:
        return turned
    wide = e.op("Cast", turned, to=int(oir.DataType.INT32))
    return e.op("Cast", e.op("Add", wide, e.const(ZERO, torch.int32)), to=int(oir.DataType.UINT8))


def quantized_rows(e: Emitter, x: oir.Value) -> tuple[Any, Any]:
    """(u8 values with zero point 128, f32 scale [..., 1]) of f32 x, once for each x."""
    key = ("quantized", x.name)
    if key not in e.memo:
        largest = e.op("ReduceMax", e.op("Abs", x), e.const([-1], torch.int64), keepdims=1)
        # 0 for a row of zeros: whatever its bytes become is multiplied by it in the end.
        scale = e.op("Div", largest, e.const(127.0, F32))
        inner = int(str(type_of(x).dims[-1]))
        values = e.op("QuantizeLinear", x, scale, _zeros(e, x), axis=-1, block_size=inner)
        e.memo[key] = (values, scale)
    found: tuple[Any, Any] = e.memo[key]
    return found


def _zeros(e: Emitter, x: oir.Value) -> Any:
    """The zero points u8[..., 1] of x's rows, once for each shape."""
    key = ("zero points", tuple(str(d) for d in type_of(x).dims[:-1]))
    if key not in e.memo:
        dims = (*type_of(x).dims[:-1], 1)
        e.memo[key] = e.op("Expand", e.const(ZERO, U8), e.shape(dims))
    return e.memo[key]


@row(G.linear_int8.default)
def linear_int8(
    e: Emitter,
    x: oir.Value,
    w: oir.Value,
    scale: oir.Value,
    bias: oir.Value | None,
    coarse: bool = False,
) -> Any:
    weight, signed = weight_of(w), coarse or signed_weights_are_exact()
    columns = _turned(e, w, signed) if weight is None else e.weight(_columns(weight, signed))
    zero = e.const(0, I8) if signed else e.const(ZERO, U8)
    if coarse:
        factors = (e.cast(x, F32), columns, e.cast(scale, F32), zero)
        extra = () if bias is None else (e.cast(bias, F32),)
        return e.cast(e.fused("DynamicQuantizeMatMul", *factors, *extra), e.dtype(), F32)
    values, row_scale = quantized_rows(e, e.cast(x, F32))
    total = e.fused(
        "MatMulIntegerToFloat",
        values,
        columns,
        e.const(1.0, F32),
        e.cast(scale, F32),
        e.const(ZERO, U8),
        zero,
    )
    result = e.op("Mul", total, row_scale)
    if bias is not None:
        result = e.op("Add", result, e.cast(bias, F32))
    return e.cast(result, e.dtype(), F32)
