"""Products of bytes by ONNX Runtime's own kernels.

Activations are rounded by row in plain ops, each exactly as the meaning of `quantized_linear` says,
so a token's result does not depend on what shares its step. The product runs on unsigned
activations, for which kernels exist.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as oir
import torch

from ...ir import TensorType, Weight, derivation, derive
from .emit import Emitter, type_of
from .probe import signed_weights_are_exact

A = torch.ops.aten
F32, U8, I8 = torch.float32, torch.uint8, torch.int8
ZERO = 128
"""What stands for 0 in unsigned bytes."""


def quantized_rows(e: Emitter, x: oir.Value) -> tuple[Any, Any]:
    """(u8 values with zero point 128, f32 scale [..., 1]) of f32 x, once for each x."""
    width = int(str(type_of(x).dims[-1]))
    made = e.once(("quantized", x.name), lambda: rounded_rows(e, x, width, zero_points(e, x)))
    return made[0], made[1]


def rounded_rows(e: Emitter, x: oir.Value, width: int, zeros: oir.Value) -> tuple[Any, Any]:
    """The same of f32 x [..., width], with the zero points u8[..., 1] given."""
    largest = e.op("ReduceMax", e.op("Abs", x), e.const([-1], torch.int64), keepdims=1)
    # 0 for a row of zeros: whatever its bytes become is multiplied by it in the end.
    scale = e.op("Div", largest, e.const(127.0, F32))
    values = e.op("QuantizeLinear", x, scale, zeros, axis=-1, block_size=width)
    return values, scale


def zero_points(e: Emitter, x: oir.Value) -> Any:
    """The zero points u8[..., 1] of x's rows, once for each shape."""
    dims = (*type_of(x).dims[:-1], 1)
    key = ("zero points", tuple(map(str, dims)))
    return e.once(key, lambda: e.op("Expand", e.const(ZERO, U8), e.shape(dims)))


def byte_product(e: Emitter, x: oir.Value, weight: Weight, scale: Weight) -> Any:
    """f32[...,N] of f32 x [...,K] and a weight of eight bits u8[N,K] around 128, scale [N,1]."""
    values, row_scale = quantized_rows(e, x)
    return product_of_rows(e, values, row_scale, columns(e, weight), e.weight(flat(scale)))


def product_of_rows(
    e: Emitter, values: oir.Value, row_scale: oir.Value, columns: oir.Value, scale: oir.Value
) -> Any:
    """f32[...,N] of rounded rows [...,K] and what `columns` gives of a weight, [K,N], scale [N]."""
    zero = e.const(ZERO, U8)
    if not e.contrib:
        total = e.op("MatMulInteger", values, columns, zero, zero)
        scaled = e.op("Mul", e.cast(total, F32, torch.int32), scale)
        return e.op("Mul", scaled, row_scale)
    middle = e.const(0, I8) if signed_weights_are_exact() else zero
    one = e.const(1.0, F32)
    total = e.fused("MatMulIntegerToFloat", values, columns, one, scale, zero, middle)
    return e.op("Mul", total, row_scale)


def columns(e: Emitter, weight: Weight) -> oir.Value:
    """A weight [...,N,K] as [...,K,N], in bytes of the sign that the kernel wants."""
    *stack, rows, width = weight.type.dims
    dims = (*stack, width, rows)
    if e.contrib and signed_weights_are_exact():
        return e.weight(derive(f"{weight.name}.kn", TensorType(I8, dims), signed_columns, weight))
    type = TensorType(U8, dims)
    return e.weight(derive(f"{weight.name}.kn.u8", type, A.transpose.int, weight, dim0=-1, dim1=-2))


@derivation
def signed_columns(w: torch.Tensor) -> torch.Tensor:
    """Bytes u8[...,N,K] around 128 as i8[...,K,N]."""
    return (w.mT.to(torch.int16) - ZERO).to(I8)


def flat(scale: Weight) -> Weight:
    """Scales [...,N,1] as f32[...,N]."""
    type = TensorType(F32, scale.type.dims[:-1])
    return derive(f"{scale.name}.flat", type, flat_scales, scale)


@derivation
def flat_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales [...,N,1] as f32[...,N]."""
    return scale.float().squeeze(-1)
