"""Rows of elementwise ops, comparisons, casts and choices."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import onnx_ir as oir
import torch

from ...ir import Sym
from ...ir import type_of as type_of_node
from .emit import Emitter, row, type_of

A = torch.ops.aten
BOOL = torch.bool


def operand(e: Emitter, x: Any, dtype: torch.dtype) -> Any:
    """A tensor, number or size as a value of the dtype."""
    if isinstance(x, oir.Value):
        return e.cast(x, dtype)
    if isinstance(x, Sym):
        return e.cast(e.scalar(x), dtype, torch.int64)
    return e.const(x, dtype)


def common(a: Any, b: Any) -> torch.dtype:
    """The dtype in which torch compares two tensors, numbers or sizes."""
    return torch.result_type(_stand_in(a), _stand_in(b))


def _stand_in(x: Any) -> Any:
    if not isinstance(x, oir.Value):
        return 0 if isinstance(x, Sym) else x
    return torch.empty((1,) * len(type_of(x).dims), dtype=type_of(x).dtype)


# -- one argument

UNARY: dict[Any, str] = {
    A.neg.default: "Neg",
    A.abs.default: "Abs",
    A.exp.default: "Exp",
    A.log.default: "Log",
    A.sqrt.default: "Sqrt",
    A.sin.default: "Sin",
    A.cos.default: "Cos",
    A.tan.default: "Tan",
    A.tanh.default: "Tanh",
    A.sigmoid.default: "Sigmoid",
    A.relu.default: "Relu",
    A.erf.default: "Erf",
    A.floor.default: "Floor",
    A.ceil.default: "Ceil",
    A.round.default: "Round",
    A.sign.default: "Sign",
    A.reciprocal.default: "Reciprocal",
    A.logical_not.default: "Not",
    A.bitwise_not.default: "Not",
    A.isnan.default: "IsNaN",
    A.isinf.default: "IsInf",
}
_TO_BOOL = {A.logical_not.default}
_SAME = {A.isnan.default, A.isinf.default}


def _unary(target: Any, e: Emitter, x: oir.Value, *_: Any) -> oir.Value:
    have = type_of(x).dtype
    dtype = BOOL if target in _TO_BOOL else have if target in _SAME else e.dtype()
    found: oir.Value = e.op(UNARY[target], operand(e, x, dtype))
    return found


def _is_bool(node: torch.fx.Node) -> bool:
    return type_of_node(node).dtype == BOOL


for _target in UNARY:
    _when = _is_bool if _target is A.bitwise_not.default else None
    row(_target, when=_when)(partial(_unary, _target))


@row(A.rsqrt.default)
def rsqrt(e: Emitter, x: oir.Value) -> Any:
    return e.op("Reciprocal", e.op("Sqrt", operand(e, x, e.dtype())))


@row(A.log1p.default)
def log1p(e: Emitter, x: oir.Value) -> Any:
    return e.op("Log", e.op("Add", operand(e, x, e.dtype()), e.const(1, e.dtype())))


@row(A.expm1.default)
def expm1(e: Emitter, x: oir.Value) -> Any:
    return e.op("Sub", e.op("Exp", operand(e, x, e.dtype())), e.const(1, e.dtype()))


@row(A.square.default)
def square(e: Emitter, x: oir.Value) -> Any:
    return e.op("Mul", x, x)


@row(A.silu.default)
def silu(e: Emitter, x: oir.Value) -> Any:
    """x times its own sigmoid."""
    if not e.contrib:
        return e.op("Mul", x, e.op("Sigmoid", x))
    return e.fused("QuickGelu", x, alpha=1.0)


@row(A.gelu.default)
def gelu(e: Emitter, x: oir.Value, approximate: str) -> Any:
    return e.op("Gelu", x, approximate=approximate)


@row(A.softplus.default)
def softplus(e: Emitter, x: oir.Value, beta: float, threshold: float) -> Any:
    dtype = e.dtype()
    scaled = e.op("Mul", x, e.const(beta, dtype)) if beta != 1 else x
    soft = e.op("Softplus", scaled)
    soft = e.op("Div", soft, e.const(beta, dtype)) if beta != 1 else soft
    return e.op("Where", e.op("Greater", scaled, e.const(threshold, dtype)), x, soft)


@row(A.leaky_relu.default)
def leaky_relu(e: Emitter, x: oir.Value, slope: float = 0.01) -> Any:
    return e.op("LeakyRelu", x, alpha=slope)


@row(A.elu.default)
def elu(e: Emitter, x: oir.Value, alpha: float, scale: float, input_scale: float) -> Any:
    # x where positive, else alpha (exp(input_scale x) - 1), all times scale
    dtype = e.dtype()
    low = x if input_scale == 1 else e.op("Mul", x, e.const(input_scale, dtype))
    low = e.op("Mul", e.op("Sub", e.op("Exp", low), e.const(1, dtype)), e.const(alpha, dtype))
    result = e.op("Where", e.op("Greater", x, e.const(0, dtype)), x, low)
    return result if scale == 1 else e.op("Mul", result, e.const(scale, dtype))


# -- two arguments


def _binary(op_type: str, e: Emitter, a: Any, b: Any, *_: Any) -> Any:
    dtype = e.dtype()
    return e.op(op_type, operand(e, a, dtype), operand(e, b, dtype))


def _scaled(e: Emitter, x: Any, alpha: Any) -> Any:
    if alpha == 1:
        return operand(e, x, e.dtype())
    return e.op("Mul", operand(e, x, e.dtype()), operand(e, alpha, e.dtype()))


@row(A.add.Tensor, A.add.Scalar)
def add(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Any:
    if e.dtype() == BOOL:
        return e.op("Or", a, operand(e, b, BOOL))
    return e.op("Add", operand(e, a, e.dtype()), _scaled(e, b, alpha))


@row(A.sub.Tensor, A.sub.Scalar)
def sub(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Any:
    return e.op("Sub", operand(e, a, e.dtype()), _scaled(e, b, alpha))


@row(A.rsub.Tensor, A.rsub.Scalar)
def rsub(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Any:
    return e.op("Sub", operand(e, b, e.dtype()), _scaled(e, a, alpha))


@row(A.mul.Tensor, A.mul.Scalar)
def mul(e: Emitter, a: Any, b: Any) -> Any:
    return _binary("And" if e.dtype() == BOOL else "Mul", e, a, b)


row(A.div.Tensor, A.div.Scalar)(partial(_binary, "Div"))


@row(A.div.Tensor_mode, A.div.Scalar_mode, A.floor_divide.default)
def div_mode(e: Emitter, a: Any, b: Any, rounding_mode: str | None = "floor") -> Any:
    dtype = e.dtype()
    if dtype.is_floating_point:
        quotient = _binary("Div", e, a, b)
        if rounding_mode == "floor":
            return e.op("Floor", quotient)
        if rounding_mode is None:
            return quotient
        return e.op("Mul", e.op("Sign", quotient), e.op("Floor", e.op("Abs", quotient)))
    if rounding_mode == "trunc":
        return _binary("Div", e, a, b)
    left, right = operand(e, a, dtype), operand(e, b, dtype)
    rest = e.op("Mod", left, right)  # takes the divisor's sign, as floor division needs
    return e.op("Div", e.op("Sub", left, rest), right)


@row(A.remainder.Tensor, A.remainder.Scalar)
def remainder(e: Emitter, a: Any, b: Any) -> Any:
    dtype = e.dtype()
    left, right = operand(e, a, dtype), operand(e, b, dtype)
    if not dtype.is_floating_point:
        return e.op("Mod", left, right)
    return e.op("Sub", left, e.op("Mul", right, e.op("Floor", e.op("Div", left, right))))


@row(A.pow.Tensor_Scalar, A.pow.Tensor_Tensor, A.pow.Scalar)
def power(e: Emitter, base: Any, exponent: Any) -> Any:
    dtype = e.dtype()
    x = operand(e, base, dtype)
    if isinstance(exponent, (int, float)) and exponent in (2, 3):
        squared = e.op("Mul", x, x)
        return squared if exponent == 2 else e.op("Mul", squared, x)
    if exponent == 0.5:
        return e.op("Sqrt", x)
    if exponent in (-0.5, -1) and isinstance(exponent, (int, float)):
        return e.op("Reciprocal", e.op("Sqrt", x) if exponent == -0.5 else x)
    return e.op("Pow", x, operand(e, exponent, dtype))


row(A.maximum.default, A.max.other)(partial(_binary, "Max"))
row(A.minimum.default, A.min.other)(partial(_binary, "Min"))


@row(
    A.clamp.default,
    A.clamp.Tensor,
    A.clamp_min.default,
    A.clamp_min.Tensor,
    A.hardtanh.default,
)
def clamp(e: Emitter, x: oir.Value, low: Any = None, high: Any = None) -> Any:
    dtype = e.dtype()
    value = operand(e, x, dtype)
    if low is not None:
        value = e.op("Max", value, operand(e, low, dtype))
    return value if high is None else e.op("Min", value, operand(e, high, dtype))


@row(A.clamp_max.default, A.clamp_max.Tensor)
def clamp_max(e: Emitter, x: oir.Value, high: Any) -> Any:
    return clamp(e, x, None, high)


COMPARISONS = {
    "eq": ("Equal", False),
    "ne": ("Equal", True),
    "lt": ("Less", False),
    "le": ("LessOrEqual", False),
    "gt": ("Greater", False),
    "ge": ("GreaterOrEqual", False),
}


def _compare(op_type: str, negate: bool, e: Emitter, a: Any, b: Any) -> Any:
    dtype = common(a, b)
    dtype = torch.int64 if dtype == BOOL and op_type != "Equal" else dtype
    result = e.op(op_type, operand(e, a, dtype), operand(e, b, dtype))
    return e.op("Not", result) if negate else result


for _name, (_op, _negate) in COMPARISONS.items():
    _packet = getattr(A, _name)
    row(_packet.Tensor, _packet.Scalar)(partial(_compare, _op, _negate))


def _logic(op_type: str, e: Emitter, a: Any, b: Any) -> Any:
    return _binary(op_type if e.dtype() == BOOL else f"Bitwise{op_type}", e, a, b)


row(A.logical_and.default)(partial(_logic, "And"))
row(A.logical_or.default)(partial(_logic, "Or"))
row(A.logical_xor.default)(partial(_logic, "Xor"))
row(A.bitwise_and.Tensor, A.bitwise_and.Scalar, A.__and__.Tensor)(partial(_logic, "And"))
row(A.bitwise_or.Tensor, A.bitwise_or.Scalar, A.__or__.Tensor)(partial(_logic, "Or"))
row(A.bitwise_xor.Tensor, A.bitwise_xor.Scalar)(partial(_logic, "Xor"))


# -- choices and casts


@row(A.where.self, A.where.ScalarOther, A.where.ScalarSelf, A.where.Scalar)
def where(e: Emitter, condition: oir.Value, a: Any, b: Any) -> Any:
    dtype = e.dtype()
    left, right = operand(e, a, dtype), operand(e, b, dtype)
    if dtype != BOOL:
        return e.op("Where", condition, left, right)
    # The kernel has no bool.
    return e.op("Or", e.op("And", condition, left), e.op("And", e.op("Not", condition), right))


@row(A.masked_fill.Scalar, A.masked_fill.Tensor)
def masked_fill(e: Emitter, x: oir.Value, mask: oir.Value, fill: Any) -> Any:
    if isinstance(fill, float) and math.isinf(fill) and not e.dtype().is_floating_point:
        fill = torch.iinfo(e.dtype()).max if fill > 0 else torch.iinfo(e.dtype()).min
    return where(e, mask, fill, x)


@row(
    A.to.dtype,
    A.to.dtype_layout,
    A.to.device,
    A.to.other,
    A._to_copy.default,
    A.type_as.default,
    A.clone.default,
    A.alias.default,
    A.contiguous.default,
    A.detach.default,
    A.lift_fresh_copy.default,
    A.dropout.default,
)
def cast(e: Emitter, x: oir.Value, *rest: Any) -> Any:
    """All of them hand on their first argument in the result's dtype."""
    return e.cast(x, e.dtype())
