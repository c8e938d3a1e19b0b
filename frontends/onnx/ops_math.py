"""ONNX ops that compute: elementwise, reductions, products, norms, activations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...ir import UnsupportedError
from .ops_shape import written
from .table import MICROSOFT, Context, op
from .values import (
    AllTokens,
    AsTheyStand,
    IsNan,
    Numbers,
    Parameter,
    Root,
    Value,
    dims,
    numbers,
    operand,
    tensor,
)

G = torch.ops.graftwork


def _divided(a: Any, b: Any) -> Any:
    """As ONNX divides: whole numbers give whole numbers."""
    whole = all(
        isinstance(x, (int, torch.SymInt)) or not (isinstance(x, float) or x.is_floating_point())
        for x in (a, b)
    )
    if not whole:
        return a / b
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    return a // b


def _power(a: Any, b: Any) -> Any:
    exponent = int(b) if isinstance(b, float) and b.is_integer() else b
    if isinstance(a, int) and isinstance(exponent, int) and abs(exponent) >= 64 and abs(a) > 1:
        raise UnsupportedError("a number that has more than 64 bits")
    return a**exponent


def _both(a: Any, b: Any, of: Callable[[Any, Any], Any], at: Callable[[Any, Any], Any]) -> Any:
    return of(a, b) if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else at(a, b)


def _tensors(f: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A function of torch that takes tensors alone, for a tensor and a number."""
    return lambda a, b: f(
        *(x if isinstance(x, torch.Tensor) else torch.full((), x) for x in (a, b))
    )


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _divided,
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Pow": _power,
    "And": lambda a, b: _both(a, b, _tensors(torch.logical_and), lambda x, y: x and y),
    "Or": lambda a, b: _both(a, b, _tensors(torch.logical_or), lambda x, y: x or y),
    "Mod": operator.mod,
}


def _binary(name: str) -> None:
    compute = _BINARY[name]

    def meaning(c: Context, a: Value, b: Value) -> Value:
        if isinstance(a, Numbers) and isinstance(b, Numbers):
            return _paired(compute, a, b)
        if name == "Div" and isinstance(b, Root) and isinstance(a, Numbers) and a.items == (1.0,):
            return b.value.rsqrt()
        return compute(operand(a), operand(b))  # type: ignore[no-any-return]

    op(name)(meaning)


for _name in _BINARY:
    _binary(_name)


def _paired(compute: Callable[[Any, Any], Any], a: Numbers, b: Numbers) -> Numbers:
    size = max(len(a.items), len(b.items))
    left, right = (x.items * size if len(x.items) == 1 else x.items for x in (a, b))
    made = tuple(compute(x, y) for x, y in zip(left, right, strict=True))
    if any(isinstance(item, int) and not -(2**63) <= item < 2**63 for item in made):
        raise UnsupportedError("a number that has more than 64 bits")
    return Numbers(made, a.scalar and b.scalar)


def _several(name: str, of: Any, at: Any) -> None:
    def meaning(c: Context, *given: Value) -> Value:
        made = given[0]
        for part in given[1:]:
            if isinstance(made, Numbers) and isinstance(part, Numbers):
                made = _paired(at, made, part)
            else:
                made = _tensors(of)(operand(made), operand(part))
        return made

    op(name)(meaning)


_several("Max", torch.maximum, torch.sym_max)
_several("Min", torch.minimum, torch.sym_min)

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Abs": torch.abs,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Relu": F.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": F.softplus,
    "Tanh": torch.tanh,
}
_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "Abs": abs,
    "Neg": operator.neg,
    "Not": operator.not_,
}


def _unary(name: str) -> None:
    def meaning(c: Context, x: Value) -> Value:
        if isinstance(x, Numbers) and name in _NUMBERS:
            return Numbers(tuple(map(_NUMBERS[name], x.items)), x.scalar)
        return _UNARY[name](tensor(x))

    op(name)(meaning)


for _name in _UNARY:
    _unary(_name)


@op("Sqrt")
def sqrt(c: Context, x: Value) -> Value:
    if isinstance(x, Numbers):
        return Numbers(tuple(map(math.sqrt, x.items)), x.scalar)
    return Root(tensor(x))


@op("Reciprocal")
def reciprocal(c: Context, x: Value) -> Value:
    if isinstance(x, Root):
        return x.value.rsqrt()
    if isinstance(x, Numbers):
        return Numbers(tuple(1 / item for item in x.items), x.scalar)
    return tensor(x).reciprocal()


@op("IsNaN")
def is_nan(c: Context, x: Value) -> Value:
    return IsNan(tensor(x))


@op("Where")
def where(c: Context, condition: Value, a: Value, b: Value) -> Value:
    # Exporters guard softmaxes of rows that see nothing; a token always sees itself.
    if isinstance(condition, IsNan) and b is condition.value:
        return b
    if isinstance(condition, Numbers) and isinstance(a, Numbers) and isinstance(b, Numbers):
        picked = [x if t else y for t, x, y in zip(condition.items, a.items, b.items, strict=True)]
        return Numbers(tuple(picked), condition.scalar)
    if isinstance(condition, Numbers) and len(condition.items) == 1:
        return a if condition.one else b
    return torch.where(tensor(condition), operand(a), operand(b))


@op("Clip")
def clip(c: Context, x: Value, low: Value = None, high: Value = None) -> Value:
    bounds = [None if bound is None else numbers(bound)[0] for bound in (low, high)]
    return tensor(x).clamp(*bounds)


@op("CumSum")
def cumsum(c: Context, x: Value, axis: Value) -> Value:
    if c.attribute("exclusive", 0) or c.attribute("reverse", 0):
        raise UnsupportedError("CumSum that is exclusive or reversed")
    if isinstance(x, AllTokens) and numbers(axis)[0] % 2 == 1:
        # How many tokens there are up to each.
        return c.positions + 1
    return tensor(x).cumsum(numbers(axis)[0])


# -- reductions


def _axes(c: Context, axes: Value, rank: int) -> list[int]:
    given = c.attribute("axes") if axes is None else numbers(axes)
    return list(range(rank)) if given is None else list(given)


_REDUCING: dict[str, Callable[..., torch.Tensor]] = {
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceSum": torch.sum,
}


def _reduction(name: str) -> None:
    def meaning(c: Context, x: Value, axes: Value = None) -> Value:
        keep = bool(c.attribute("keepdims", 1))
        if isinstance(x, AllTokens) and name == "ReduceSum":
            shape = (x.batch, 1) if keep else (x.batch,)
            return torch.full(shape, x.tokens, dtype=torch.int64)
        y = tensor(x)
        return _REDUCING[name](y, _axes(c, axes, y.dim()), keep)

    op(name)(meaning)


for _name in _REDUCING:
    _reduction(_name)


@op("ReduceProd")
def reduce_prod(c: Context, x: Value, axes: Value = None) -> Value:
    return Numbers((math.prod(numbers(x)),), not c.attribute("keepdims", 1))


@op("ArgMax")
def argmax(c: Context, x: Value) -> Value:
    return tensor(x).argmax(c.attribute("axis", 0), bool(c.attribute("keepdims", 1)))


@op("TopK")
def topk(c: Context, x: Value, count: Value) -> Any:
    axis, largest = c.attribute("axis", -1), bool(c.attribute("largest", 1))
    in_order = AllTokens if largest else AsTheyStand
    if isinstance(x, in_order) and axis % 2 == 1 and numbers(count)[0] == x.tokens:
        return x, AsTheyStand(x.batch, x.tokens)
    return tensor(x).topk(numbers(count)[0], axis, largest)


@op("Softmax")
def softmax(c: Context, x: Value) -> Value:
    return F.softmax(tensor(x), c.attribute("axis", -1))


# -- products


@op("MatMul")
def matmul(c: Context, a: Value, b: Value) -> Value:
    if isinstance(b, Parameter) and b.tensor.dim() == 2:
        return F.linear(tensor(a), b.tensor if b.turned else b.tensor.t())
    return torch.matmul(tensor(a), tensor(b))


@op("FusedMatMul", domain=MICROSOFT)
def fused_matmul(c: Context, a: Value, b: Value) -> Value:
    sides = [_turned(c, a, "transA"), _turned(c, b, "transB")]
    made = matmul(c, *sides)
    alpha = c.attribute("alpha", 1.0)
    return made if alpha == 1.0 else tensor(made).mul(alpha)


def _turned(c: Context, x: Value, name: str) -> Value:
    if not c.attribute(name, 0):
        return x
    if isinstance(x, Parameter):
        return Parameter(x.name, x.tensor, not x.turned)
    return tensor(x).transpose(-1, -2)


@op("Gemm")
def gemm(c: Context, a: Value, b: Value, bias: Value = None) -> Value:
    if c.attribute("alpha", 1.0) != 1.0 or c.attribute("beta", 1.0) != 1.0:
        raise UnsupportedError("Gemm that scales")
    made = tensor(matmul(c, _turned(c, a, "transA"), _turned(c, b, "transB")))
    return made if bias is None else made + operand(bias)


@op("Einsum")
def einsum(c: Context, *given: Value) -> Value:
    return torch.einsum(c.attribute("equation"), *(tensor(x) for x in given))


# -- norms and activations


@op("LayerNormalization")
def layer_norm(c: Context, x: Value, scale: Value, bias: Value = None) -> Value:
    if c.attribute("axis", -1) not in (-1, len(dims(x)) - 1):
        raise UnsupportedError("LayerNormalization over several axes")
    shift = None if bias is None else tensor(bias)
    made: torch.Tensor = G.layer_norm(tensor(x), tensor(scale), shift, eps=_epsilon(c, 1e-5))
    return made


@op("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(c: Context, x: Value, scale: Value, *_: Value) -> Any:
    if c.attribute("axis", -1) not in (-1, len(dims(x)) - 1):
        raise UnsupportedError("RMSNormalization over several axes")
    made: torch.Tensor = G.rms_norm(tensor(x), tensor(scale), eps=_epsilon(c, 1e-5))
    return made


op("SimplifiedLayerNormalization", domain=MICROSOFT)(rms_norm)


def _epsilon(c: Context, default: float) -> float:
    return written(c.attribute("epsilon", default))


def _skipped(x: Value, skip: Value, bias: Value) -> torch.Tensor:
    total = tensor(x) + tensor(skip)
    return total if bias is None else total + tensor(bias)


@op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_rms_norm(c: Context, x: Value, skip: Value, scale: Value, bias: Value = None) -> Any:
    total = _skipped(x, skip, bias)
    return G.rms_norm(total, tensor(scale), eps=_epsilon(c, 1e-5)), None, None, total


@op("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_norm(
    c: Context, x: Value, skip: Value, scale: Value, shift: Value = None, bias: Value = None
) -> Any:
    total = _skipped(x, skip, bias)
    added = None if shift is None else tensor(shift)
    return G.layer_norm(total, tensor(scale), added, eps=_epsilon(c, 1e-5)), None, None, total


@op("Gelu")
def gelu(c: Context, x: Value) -> Value:
    return F.gelu(tensor(x), approximate=c.attribute("approximate", "none"))


op("Gelu", domain=MICROSOFT)(gelu)


@op("FastGelu", domain=MICROSOFT)
def fast_gelu(c: Context, x: Value, bias: Value = None) -> Value:
    y = tensor(x) if bias is None else tensor(x) + tensor(bias)
    return F.gelu(y, approximate="tanh")


def _swish(c: Context, x: Value, usual: float) -> Value:
    alpha, y = c.attribute("alpha", usual), tensor(x)
    return F.silu(y) if alpha == 1.0 else y * torch.sigmoid(alpha * y)


op("QuickGelu", domain=MICROSOFT)(partial(_swish, usual=1.702))
op("Swish")(partial(_swish, usual=1.0))
