"""Type inference by trial sizes.

An op is run on meta tensors with a few choices of sizes for its symbols. A dim of a result is then
a number, a dim of an argument, or the sum or product of two, if that fits all choices. Choices are
ones and large primes in both orders: no comparison (``T >= 5``, ``T <= C``) holds in all of them,
and no two polynomials of low degree agree. All other calls are left to torch's symbolic shapes
(`infer.py`), which load 55 MB of torch's compiler that running a saved program does not need.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import combinations_with_replacement
from typing import Any

import torch

from ..types import Dim, Sym, TensorType, ValueType, leaves, make_dim

_PRIMES = (7919, 7927, 7933, 7937, 7949, 7951)
_ORDERS = (
    lambda _, __: 1,
    lambda place, _: _PRIMES[place],
    lambda place, n: _PRIMES[n - place],
)
Sizes = dict[str, int]


def sampled(target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> ValueType | None:
    """The type of a call, with types in the place of tensors; None if trial sizes do not determine
    it."""
    dims = list(dict.fromkeys(_dims((args, kwargs))))
    names = sorted({name for dim in dims for name in dim.symbols})
    if len(names) >= len(_PRIMES):
        return None
    if not any(isinstance(leaf, TensorType) for leaf in leaves(args)):
        if not _makes_tensors(target):
            return None
        kwargs = {**kwargs, "device": "meta"}
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return _pointwise(target, args, kwargs)
    if target is torch.ops.aten.cat.default:
        return _concatenated(*args, **kwargs)
    choices = [{n: order(i, len(names)) for i, n in enumerate(names)} for order in _ORDERS]
    choices = choices if names else choices[:1]
    try:
        with torch.no_grad():
            results = [target(*_at(args, s), **_at(kwargs, s)) for s in choices]
    except Exception:  # symbolic inference reports the error
        return None
    return _type(results, dims, choices)


def _pointwise(target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> TensorType | None:
    """The type of an elementwise op: dtype from a call on single elements, shape by broadcasting.
    (On meta tensors such ops load torch's compiler.)"""
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, TensorType)]
    dims: list[Dim] = []
    for place in range(max((len(operand.dims) for operand in operands), default=0)):
        found = {x.dims[-1 - place] for x in operands if place < len(x.dims)} - {1}
        if len(found) > 1:
            return None
        dims.insert(0, found.pop() if found else 1)
    try:
        with torch.no_grad():
            result = target(*_one(args), **_one(kwargs))
    except Exception:  # as in `sampled`
        return None
    fits = isinstance(result, torch.Tensor) and result.dim() == len(dims)
    return TensorType(result.dtype, tuple(dims)) if fits else None


def _concatenated(tensors: list[TensorType], dim: int = 0) -> TensorType | None:
    """The type of ``aten.cat``. (On meta tensors it loads torch's compiler.)"""
    first, rank = tensors[0], len(tensors[0].dims)
    if not -rank <= dim < rank or len({(x.dtype, len(x.dims)) for x in tensors}) > 1:
        return None
    place = dim % rank
    if len({(*x.dims[:place], *x.dims[place + 1 :]) for x in tensors}) > 1:
        return None
    size = reduce(operator.add, (x.dims[place] for x in tensors))
    return TensorType(first.dtype, (*first.dims[:place], size, *first.dims[place + 1 :]))


def _one(value: Any) -> Any:
    """Arguments with all sizes 1, as tensors in memory."""
    return _filled(
        value, lambda type: torch.ones([1] * len(type.dims), dtype=type.dtype), lambda _: 1
    )


def _type(results: list[Any], dims: list[Sym], choices: list[Sizes]) -> ValueType | None:
    """The type that fits the results of all choices; None if there is none."""
    first = results[0]
    if isinstance(first, (tuple, list)):
        if len({len(each) for each in results}) > 1:
            return None
        parts = [_type(list(each), dims, choices) for each in zip(*results, strict=True)]
        fit = [part for part in parts if isinstance(part, TensorType)]
        return tuple(fit) if len(fit) == len(parts) else None
    if not isinstance(first, torch.Tensor) or len({x.dim() for x in results}) > 1:
        return None
    found = [
        _dim(list(sizes), dims, choices) for sizes in zip(*(x.shape for x in results), strict=True)
    ]
    whole = [dim for dim in found if dim is not None]
    return TensorType(first.dtype, tuple(whole)) if len(whole) == len(found) else None


def _dim(sizes: list[int], dims: list[Sym], choices: list[Sizes]) -> Dim | None:
    """The dim with these sizes at the choices; None if there is none."""
    if len(set(sizes)) == 1:
        return sizes[0]
    for base in _likely(dims):
        tried = [base.evaluate(choice.__getitem__) for choice in choices]
        apart = {size - value for size, value in zip(sizes, tried, strict=True)}
        if len(apart) == 1:
            return make_dim(f"{base} + ({apart.pop()})")
        times = {size / value if value else 0.0 for size, value in zip(sizes, tried, strict=True)}
        if len(times) == 1 and (factor := times.pop()).is_integer():
            return make_dim(f"({base}) * {int(factor)}")
    return None


def _likely(dims: list[Sym]) -> Iterator[Sym]:
    """Candidates for dims of results."""
    yield from dims
    for one, other in combinations_with_replacement(dims, 2):
        made = (one * other, one + other, one - other)
        yield from (dim for dim in made if isinstance(dim, Sym))


def _dims(value: Any) -> Iterator[Sym]:
    """The symbolic sizes in arguments."""
    for leaf in leaves(value):
        dims = leaf.dims if isinstance(leaf, TensorType) else (leaf,)
        yield from (dim for dim in dims if isinstance(dim, Sym))


def _makes_tensors(target: Callable[..., Any]) -> bool:
    """Whether an op takes a device, as ops that create tensors do."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(given.name == "device" for given in schema.arguments)


def _at(value: Any, sizes: Sizes) -> Any:
    """Arguments at some sizes, as meta tensors."""

    def empty(type: TensorType) -> torch.Tensor:
        return torch.empty(_at(list(type.dims), sizes), dtype=type.dtype, device="meta")

    return _filled(value, empty, lambda size: size.evaluate(sizes.__getitem__))


def _filled(value: Any, tensor: Callable[..., Any], number: Callable[..., Any]) -> Any:
    """Arguments with `tensor` applied to types and `number` to symbolic sizes."""
    if isinstance(value, TensorType):
        return tensor(value)
    if isinstance(value, Sym):
        return number(value)
    if isinstance(value, dict):
        return {name: _filled(item, tensor, number) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, tensor, number) for item in value)
    return value
