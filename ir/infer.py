"""Type inference: an op's result types from its argument types, by running its fake kernel.

Types come only from here. The result is memoised by (op, argument types), so the layers of a deep
model cost as much as one. The symbolic shapes are torch's: each named symbol (`B`, `T`, `C`, ...)
is one symbol of a `ShapeEnv` that lives as long as the process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.fx

from .errors import VerifyError
from .types import Dim, Sym, TensorType, ValueType, make_dim, type_text

# Hints only decide comparisons such as "is this dim 1?" in torch's broadcasting rules; they differ
# from each other and from the sizes that models have, so that no two dims are equal by accident.
_HINTS = (7919, 7927, 7933, 7937, 7949, 7951, 7963, 7993, 8009, 8011, 8017, 8039)


class _Shapes:
    """Fake tensors with named symbolic sizes. The only user of torch's private shape machinery."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.sizes: dict[str, Any] = {}
        self.names: dict[str, str] = {}

    def size(self, name: str) -> Any:
        """The SymInt that stands for symbol `name`."""
        if name not in self.sizes:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            source = ConstantSource(f"graftwork_{name}")
            hint = _HINTS[len(self.sizes) % len(_HINTS)] + 8000 * (len(self.sizes) // len(_HINTS))
            symbol = self.env.create_symbol(
                hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
            )
            self.sizes[name] = self.env.create_symintnode(symbol, hint=hint, source=source)
            self.names[str(symbol)] = name
        return self.sizes[name]

    def fake(self, tensor_type: TensorType) -> torch.Tensor:
        """A fake tensor of the type (call inside `self.mode`)."""
        dims = [self.value(dim) for dim in tensor_type.dims]
        return torch.empty(dims, dtype=tensor_type.dtype)

    def value(self, dim: Dim) -> Any:
        """An int or SymInt for a dim."""
        return dim.evaluate(self.size) if isinstance(dim, Sym) else dim

    def dim(self, size: Any) -> Dim:
        """A dim from an int or SymInt."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        renamed = {s: self.names.get(str(s), str(s)) for s in expr.free_symbols}
        return make_dim(expr.subs({s: type(s)(n, integer=True) for s, n in renamed.items()}))


@lru_cache(maxsize=1)
def _shapes() -> _Shapes:
    return _Shapes()


class _Leaf:
    """A hashable stand-in for one argument; dtypes and floats compare with their Python type."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = (type(value).__name__, str(value))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaf) and self.key == other.key


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        if "type" not in value.meta:
            raise VerifyError(f"{value} is used as an argument but has no type")
        return _Leaf(value.meta["type"])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(_freeze(item) for item in value))
    if isinstance(value, dict):
        return ("dict", tuple((k, _freeze(v)) for k, v in value.items()))
    return _Leaf(value)


def _thaw(frozen: Any, shapes: _Shapes) -> Any:
    if not isinstance(frozen, _Leaf):
        kind, items = frozen
        if kind == "dict":
            return {k: _thaw(v, shapes) for k, v in items}
        values = [_thaw(item, shapes) for item in items]
        return values if kind == "list" else tuple(values)
    return _instantiate(frozen.value, shapes)


def _instantiate(value: Any, shapes: _Shapes) -> Any:
    if isinstance(value, TensorType):
        return shapes.fake(value)
    if isinstance(value, Sym):
        return shapes.value(value)
    if isinstance(value, tuple) and value and isinstance(value[0], TensorType):
        return tuple(shapes.fake(item) for item in value)
    return value


def infer(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueType:
    """Result type of calling `target` on `args`, which hold `fx.Node`s that have types.

    Errors: `VerifyError` naming the op, its argument types and what its fake kernel said.
    """
    return _infer(target, _freeze(args), _freeze(kwargs))


@lru_cache(maxsize=65536)
def _infer(target: Callable[..., Any], args: Any, kwargs: Any) -> ValueType:
    shapes = _shapes()
    if target is operator.getitem:
        source, index = args[1][0].value, args[1][1].value
        if not isinstance(source, tuple) or not -len(source) <= index < len(source):
            raise VerifyError(f"cannot take result {index} of a value of type {source}")
        item: ValueType = source[index]
        return item
    try:
        with shapes.mode, torch.no_grad():
            result = target(*_thaw(args, shapes), **_thaw(kwargs, shapes))
    except Exception as error:  # fake kernels raise whatever they like
        listing = ", ".join(_arg_text(a) for a in (*args[1], *(v for _, v in kwargs[1])))
        raise VerifyError(f"{target} cannot take ({listing}): {error}") from error
    return _type_of(result, shapes, target)


def _arg_text(frozen: Any) -> str:
    if isinstance(frozen, _Leaf):
        value = frozen.value
        return type_text(value) if isinstance(value, (TensorType, tuple)) else str(value)
    return "[" + ", ".join(_arg_text(item) for item in frozen[1]) + "]"


def _type_of(result: Any, shapes: _Shapes, target: Any) -> ValueType:
    if isinstance(result, torch.Tensor):
        return TensorType(result.dtype, tuple(shapes.dim(n) for n in result.shape))
    if isinstance(result, (tuple, list)):
        return tuple(_type_of(item, shapes, target) for item in result)
    raise VerifyError(f"{target} returns a {type(result).__name__}; IR values are tensors")
