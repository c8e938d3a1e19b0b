"""Products of bytes by ONNX Runtime's own kernels.

Activations are rounded by row in plain ops, each exactly as the meaning of `quantized_linear` says,
so a token's result does not depend on what shares its step. The product runs on unsigned
activations, for which kernels exist.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as oir
import torch

from ...ir import TensorType, Weight, derive
from .emit import Emitter, type_of
from .probe import signed_weights_are_exact

F32, U8, I8 = torch.float32, torch.uint8, torch.int8
ZERO = 128
"""What stands for 0 in unsigned bytes."""


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


def byte_product(e: Emitter, x: oir.Value, weight: Weight, scale: Weight) -> Any:
    """f32[...,N] of f32 x [...,K] and a weight of eight bits u8[N,K] around 128, scale [N,1]."""
    signed = signed_weights_are_exact()
    values, row_scale = quantized_rows(e, x)
    if not e.contrib:
        return _standard_product(e, values, row_scale, weight, scale)
    total = e.fused(
        "MatMulIntegerToFloat",
        values,
        e.weight(_columns(weight, signed)),
        e.const(1.0, F32),
        e.weight(_flat(scale)),
        e.const(ZERO, U8),
        e.const(0, I8) if signed else e.const(ZERO, U8),
    )
    return e.op("Mul", total, row_scale)


def _standard_product(
    e: Emitter, values: oir.Value, row_scale: oir.Value, weight: Weight, scale: Weight
) -> Any:
    """The same by ONNX's MatMulInteger."""
    columns = e.weight(_columns(weight, signed=False))
    zero = e.const(ZERO, U8)
    total = e.op("MatMulInteger", values, columns, zero, zero)
    scaled = e.op("Mul", e.cast(total, F32, torch.int32), e.weight(_flat(scale)))
    return e.op("Mul", scaled, row_scale)


def _columns(weight: Weight, signed: bool) -> Weight:
    """The weight as [K,N], in bytes of the sign that the kernel wants."""
    rows, columns = weight.type.dims
    if signed:
        turned = TensorType(I8, (columns, rows))
        return derive(f"{weight.name}.kn", turned, _signed, weight)
    turned = TensorType(U8, (columns, rows))
    return derive(f"{weight.name}.kn.u8", turned, lambda w: w.T, weight)


def _signed(w: torch.Tensor) -> torch.Tensor:
    return (w.T.to(torch.int16) - ZERO).to(I8)


def _flat(scale: Weight) -> Weight:
    type = TensorType(F32, scale.type.dims[:1])
    return derive(f"{scale.name}.flat", type, lambda s: s.float().flatten(), scale)
