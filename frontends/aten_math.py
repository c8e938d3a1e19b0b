"""Lowerings of ops that compute: programs say linear, matmul, where and a few elementwise ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.fx

from ..ir import UnsupportedError, type_of
from .aten import A, Call, lowers
from .builder import Builder


def _matmul(b: Builder, x: torch.fx.Node, w: torch.fx.Node) -> torch.fx.Node:
    """x @ w; a linear layer if w is a weight, whose transpose is then taken once, when loaded."""
    if w.op != "get_attr" or len(type_of(w).dims) != 2 or x.op == "get_attr":
        return b.call(A.matmul.default, x, w)
    return linear(b, x, b.permute(w, [1, 0]), None)


def linear(b: Builder, x: torch.fx.Node, w: torch.fx.Node, bias: Any) -> torch.fx.Node:
    """x w^T + bias on the last axis, without the flattening to a matrix that Conv1D does."""
    extra = () if bias is None else (bias,)
    return b.call(A.linear.default, x, w, *extra)


@lowers(A.linear.default)
def linear_(c: Call) -> Any:
    return linear(c.b, c.args[0], c.args[1], c.arg(2, "bias"))


@lowers(A.matmul.default, A.mm.default, A.bmm.default)
def matmul(c: Call) -> Any:
    return _matmul(c.b, c.args[0], c.args[1])


@lowers(A.addmm.default, A.baddbmm.default)
def addmm(c: Call) -> Any:
    bias, x, w = c.args
    beta, alpha = c.kwargs.get("beta", 1), c.kwargs.get("alpha", 1)
    plain = beta == 1 and alpha == 1
    if plain and w.op == "get_attr" and len(type_of(w).dims) == 2 and bias.op == "get_attr":
        return linear(c.b, x, c.b.permute(w, [1, 0]), bias)
    product = _scaled(c.b, _matmul(c.b, x, w), alpha)
    return c.b.call(A.add.Tensor, product, _scaled(c.b, bias, beta))


def _scaled(b: Builder, x: torch.fx.Node, factor: Any) -> torch.fx.Node:
    return x if factor == 1 else b.call(A.mul.Tensor, x, factor)


def _sum(c: Call, target: Any) -> Any:
    """A sum or difference; a factor of the second argument is multiplied out."""
    left, right, alpha = c.args[0], c.args[1], c.arg(2, "alpha", 1)
    if alpha != 1:
        number = not isinstance(right, torch.fx.Node)
        right = right * alpha if number else c.b.call(A.mul.Tensor, right, alpha)
    return c.b.call(target, left, right)


lowers(A.add.Tensor, A.add.Scalar)(partial(_sum, target=A.add.Tensor))
lowers(A.sub.Tensor, A.sub.Scalar)(partial(_sum, target=A.sub.Tensor))


def _of_two(c: Call, target: Any) -> Any:
    """An op of the first two arguments."""
    return c.b.call(target, *c.args[:2])


for _target, *_spellings in (
    (A.mul.Tensor, A.mul.Scalar),
    (A.div.Tensor, A.div.Scalar, A.true_divide.Tensor),
    (A.maximum.default, A.max.other),
    (A.minimum.default, A.min.other),
):
    lowers(_target, *_spellings)(partial(_of_two, target=_target))


@lowers(A.rsub.Scalar, A.rsub.Tensor)
def rsub(c: Call) -> Any:
    """second - first."""
    negated = c.b.call(A.neg.default, c.args[0])
    return c.b.call(A.add.Tensor, negated, c.args[1])


@lowers(A.div.Tensor_mode, A.div.Scalar_mode, A.floor_divide.default)
def div_mode(c: Call) -> Any:
    mode = c.kwargs.get("rounding_mode", "floor")
    return c.b.call(A.div.Tensor_mode, c.args[0], c.args[1], rounding_mode=mode)


@lowers(A.square.default)
def square(c: Call) -> Any:
    return c.b.call(A.pow.Tensor_Scalar, c.args[0], 2)


@lowers(A.softmax.int, A._softmax.default)
def softmax(c: Call) -> Any:
    """softmax(x, axis, dtype): the cast, then the softmax."""
    source = c.b.cast(c.args[0], c.dtype)
    return c.b.call(A._softmax.default, source, c.args[1] % c.fake.dim(), False)


@lowers(A.layer_norm.default)
def layer_norm(c: Call) -> Any:
    weight, bias, eps = c.arg(2, "weight"), c.arg(3, "bias"), c.arg(4, "eps", 1e-5)
    return c.b.call(A.layer_norm.default, c.args[0], list(c.args[1]), weight, bias, eps)


@lowers(A.rms_norm.default)
def rms_norm(c: Call) -> Any:
    """As models write it themselves: x * rsqrt(mean(x^2) + eps) in float32, times the weight."""
    x, dims, weight = c.args[0], c.args[1], c.arg(2, "weight")
    eps = c.arg(3, "eps")
    eps = torch.finfo(c.dtype).eps if eps is None else eps
    wide = c.b.cast(x, torch.float32)
    axes = list(range(-len(dims), 0))
    mean = c.b.call(A.mean.dim, c.b.call(A.pow.Tensor_Scalar, wide, 2), axes, True)
    scale = c.b.call(A.rsqrt.default, c.b.call(A.add.Tensor, mean, eps))
    out = c.b.call(A.mul.Tensor, wide, scale)
    if weight is not None:
        out = c.b.call(A.mul.Tensor, out, c.b.cast(weight, torch.float32))
    return c.b.cast(out, c.dtype)


@lowers(A.mean.dim, A.sum.dim_IntList)
def reduce(c: Call) -> Any:
    """Means and sums over named axes, the cast before them spelled out."""
    source, axes = c.b.cast(c.args[0], c.dtype), c.args[1]
    axes = list(range(c.rank(0))) if axes is None else list(axes)
    return c.b.call(c.target, source, axes, bool(c.arg(2, "keepdim", False)))


@lowers(A.linalg_vector_norm.default, A.norm.ScalarOpt_dim)
def vector_norm(c: Call) -> Any:
    """The 1-norm and the 2-norm, which routers use to normalise expert weights."""
    order, axes, keep = c.arg(1, "ord", 2), c.arg(2, "dim"), bool(c.arg(3, "keepdim", False))
    if order == 1:
        magnitude = c.b.call(A.abs.default, c.args[0])
        return c.b.call(A.sum.dim_IntList, magnitude, list(axes), keep)
    if order == 2:
        square_sum = c.b.call(A.pow.Tensor_Scalar, c.args[0], 2)
        return c.b.call(A.sqrt.default, c.b.call(A.sum.dim_IntList, square_sum, list(axes), keep))
    raise UnsupportedError(f"the norm of order {order} is not supported; expected 1 or 2")


@lowers(A.index_put.default)
def index_put(c: Call) -> Any:
    """A number put where a mask of the value's own shape holds; what else the op can do is refused
    at the end."""
    x, places, value = c.args[:3]
    mask = places[0] if len(places) == 1 else None
    if mask is None or type_of(mask).dtype != torch.bool or c.arg(3, "accumulate"):
        return c.b.call(c.target, *c.args, **c.kwargs)
    if c.b.shape(mask) != c.b.shape(x) or c.b.shape(value) != []:
        return c.b.call(c.target, *c.args, **c.kwargs)
    return c.b.call(A.where.self, mask, c.b.cast(value, type_of(x).dtype), x)


@lowers(A.where.self, A.where.ScalarOther, A.where.ScalarSelf, A.where.Scalar)
def where(c: Call) -> Any:
    condition, left, right = c.args
    return c.b.call(A.where.self, condition, _tensor(c, left), _tensor(c, right))


def _tensor(c: Call, value: Any) -> torch.fx.Node:
    if isinstance(value, torch.fx.Node):
        return value
    return c.b.call(A.full.default, [], value, dtype=c.dtype)


@lowers(A.masked_fill.Scalar, A.masked_fill.Tensor)
def masked_fill(c: Call) -> Any:
    source, mask, value = c.args
    if not isinstance(value, torch.fx.Node):
        return c.b.call(A.masked_fill.Scalar, c.b.expand(source, c.shape), mask, value)
    return c.b.call(A.where.self, mask, value, source)


def _logical(c: Call, target: Any) -> Any:
    if c.dtype != torch.bool:
        raise UnsupportedError(f"{c.target} on {c.dtype} is not supported; expected bool")
    return c.b.call(target, *c.args)


for _target, *_spellings in (
    (A.logical_and.default, A.bitwise_and.Tensor, A.__and__.Tensor),
    (A.logical_or.default, A.bitwise_or.Tensor, A.__or__.Tensor),
    (A.logical_not.default, A.bitwise_not.default),
):
    lowers(_target, *_spellings)(partial(_logical, target=_target))


@lowers(A.scaled_dot_product_attention.default)
def attention(c: Call) -> Any:
    """The dtype of what the mask holds and the defaults stay; attention is raised later."""
    q, k, v = c.args[:3]
    mask, causal = c.arg(3, "attn_mask"), bool(c.arg(5, "is_causal", False))
    if c.arg(4, "dropout_p", 0.0):
        raise UnsupportedError("attention with dropout: put the model into eval() mode first")
    extra = {"scale": c.kwargs.get("scale"), "enable_gqa": c.kwargs.get("enable_gqa", False)}
    return c.b.call(A.scaled_dot_product_attention.default, q, k, v, mask, 0.0, causal, **extra)
