"""Type inference: an op's result types from its argument types, by running its fake kernel.

Results are memoised by (op, argument types), so the layers of a deep model cost as much as one.
Trial sizes come first (`trial_sizes.py`); otherwise torch's symbolic shapes, where each named
symbol (`B`, `T`, `C`, ...) is a symbol of one `ShapeEnv` per process.

A type must hold for every size of at least 1. An op whose result depends on comparing a symbol with
a number is refused (``x[:, :5]`` of ``f32[B,T]`` is f32[B,5] only if T >= 5). Exception: a slice
with symbolic ends is assumed to lie within a dim that is a number, as ``table[:T]`` of
``f32[2048,64]``. Conditions of an op are granted to the calls that it is decomposed into.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.fx

from ..support.errors import InputError, VerifyError
from ..support.threads import traces
from ..types import Dim, Sym, TensorType, ValueType, make_dim, type_text
from .signature import mismatch
from .trial_sizes import sampled

# Hints decide comparisons such as "is this dim 1?" in torch's broadcasting rules. They differ from
# each other and from common sizes, so that no two dims are equal by accident. Symbols that every
# program has get the first hints, so that decisions and messages do not depend on history.
_FIRST = ("B", "T", "C")
_HINTS = (7919, 7927, 7933, 7937, 7949, 7951, 7963, 7993, 8009, 8011, 8017, 8039)


class _Shapes:
    """Fake tensors with named symbolic sizes, on torch's private shape machinery."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self._fakes = FakeTensorMode(shape_env=self.env)
        self._fakes.cache_enabled = False  # results are memoised below
        self.sizes: dict[str, Any] = {}
        self.hints: dict[int, str] = {}
        self.names: dict[str, str] = {}
        for name in _FIRST:
            self.size(name)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which ops run on fakes. Python decompositions are preferred: C++ ones may
        replace symbols by hints (matmul in torch 2.11)."""
        from torch._dispatch.python import enable_python_dispatcher

        with self._fakes, torch.no_grad(), enable_python_dispatcher():
            yield

    def size(self, name: str) -> Any:
        """The SymInt of symbol `name`."""
        if name not in self.sizes:
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            source = ConstantSource(f"graftwork_{name.replace('.', '_')}")
            hint = _HINTS[len(self.sizes) % len(_HINTS)] + 8000 * (len(self.sizes) // len(_HINTS))
            symbol = self.env.create_symbol(
                hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
            )
            self.sizes[name] = self.env.create_symintnode(symbol, hint=hint, source=source)
            self.names[str(symbol)] = name
            self.hints[hint] = name
        return self.sizes[name]

    def fake(self, tensor_type: TensorType) -> torch.Tensor:
        """A fake tensor of the type (call inside `active`)."""
        dims = [self.value(dim) for dim in tensor_type.dims]
        return torch.empty(dims, dtype=tensor_type.dtype)

    def assumptions(self, known: int) -> list[str]:
        """Comparisons decided by hints after the first `known` guards, except "not equal"."""
        fresh = [str(guard.expr) for guard in self.env.guards[known:]]
        return [self.readable(text) for text in fresh if not text.startswith("Ne(")]

    def fixed(self) -> str:
        """Symbols that torch replaced by their hints, as text; "" if none. The result is then valid
        for one size only, which is never granted."""
        found = {name: self.dim(size) for name, size in self.sizes.items()}
        return " and ".join(f"{n} = {dim}" for n, dim in found.items() if isinstance(dim, int))

    def readable(self, text: str) -> str:
        """Torch's symbol names replaced by ours."""
        return re.sub(r"\bs\d+\b", lambda m: self.names.get(m.group(), m.group()), text)

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
    """A hashable argument: types by value, others by Python type and text."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        is_type = isinstance(value, TensorType)
        self.key = value if is_type else (type(value).__name__, str(value))

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
    value = frozen.value
    if isinstance(value, TensorType):
        return shapes.fake(value)
    if isinstance(value, Sym):
        return shapes.value(value)
    if isinstance(value, tuple) and value and isinstance(value[0], TensorType):
        return tuple(shapes.fake(item) for item in value)
    return value


def infer(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    granted: bool = False,
) -> ValueType:
    """Result type of calling `target` on `args`, which hold `fx.Node`s that have types.

    granted: accept a type that depends on comparisons of sizes, which hold because of the op that
    the call was decomposed from. Errors: `VerifyError` naming the op, its argument types and the
    error of its fake kernel.
    """
    frozen = _freeze(args), _freeze(kwargs)
    found, assumed = _infer(target, *frozen)
    if assumed and not granted:
        reason = f"the result depends on sizes: it would hold only where {' and '.join(assumed)}"
        raise _refusal(target, *frozen, reason)
    return found


def inferred(node: torch.fx.Node) -> ValueType:
    """Result type of a call node, inferred again. Errors: those of `infer`."""
    granted = node.meta.get("granted", False)
    return infer(node.target, node.args, dict(node.kwargs), granted=granted)  # type: ignore[arg-type]


@lru_cache(maxsize=65536)
@traces
def _infer(target: Callable[..., Any], args: Any, kwargs: Any) -> tuple[ValueType, list[str]]:
    """The type, and the comparisons of sizes that it depends on."""
    if target is operator.getitem:
        source, index = args[1][0].value, args[1][1].value
        if not isinstance(source, tuple) or not -len(source) <= index < len(source):
            raise VerifyError(f"cannot take result {index} of a value of type {source}")
        return source[index], []
    wrong = mismatch(target, _plain(args), {k: _plain(v) for k, v in kwargs[1]})
    if wrong is not None:
        raise _refusal(target, args, kwargs, wrong)
    try:
        found: ValueType | None = _ruled(target, args, kwargs)
    except Exception as error:
        raise _refusal(target, args, kwargs, str(error)) from error
    if found is None:
        found = sampled(target, _plain(args), {k: _plain(v) for k, v in kwargs[1]})
    return symbolic(target, args, kwargs) if found is None else (found, [])


def symbolic(target: Callable[..., Any], args: Any, kwargs: Any) -> tuple[ValueType, list[str]]:
    """The type by torch's symbolic shapes, and the comparisons that it depends on."""
    shapes = _shapes()
    known = len(shapes.env.guards)
    try:
        with shapes.active(), _quiet():
            result = target(*_thaw(args, shapes), **_thaw(kwargs, shapes))
        found = _type_of(result, shapes, target)
        if fixed := shapes.fixed():
            raise VerifyError(f"it is computed for one size only: it would hold only where {fixed}")
    except Exception as error:  # fake kernels raise anything
        forget_guesses(shapes, known)
        raise _refusal(target, args, kwargs, shapes.readable(str(error))) from error
    return found, forget_guesses(shapes, known)


def forget_guesses(shapes: _Shapes, known: int) -> list[str]:
    """Comparisons assumed after the first `known` guards. If any, reset the shapes: guards would
    stay in force for later ops."""
    assumed = shapes.assumptions(known)
    if assumed:
        _shapes.cache_clear()
    return assumed


def _refusal(target: Any, args: Any, kwargs: Any, reason: str) -> VerifyError:
    listing = ", ".join(_arg_text(a) for a in (*args[1], *(v for _, v in kwargs[1])))
    return VerifyError(f"{target} cannot take ({listing}): {reason}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable torch's log of fake tensor errors, which are raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _ruled(target: Any, args: Any, kwargs: Any) -> TensorType | None:
    """Types of slices and squeezes of symbolic dims, which torch decides by hints; None for other
    calls. Errors: `InputError` for a selected element that may not exist."""
    if target not in (_SLICE, _SELECT, *_SQUEEZES):
        return None
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, map(_plain, args[1]), strict=False))
    given |= {name: _plain(value) for name, value in kwargs[1]}
    source, axis = given.get("self"), given.get("dim", 0)
    if not isinstance(source, TensorType):
        return None
    if target is _SELECT:
        _check_element(source.dims[axis], given["index"])
        return None
    if target is not _SLICE:
        axes = axis if isinstance(axis, (list, tuple)) else [axis]
        if any(isinstance(source.dims[i], Sym) for i in axes):
            raise InputError("squeezing a symbolic dim would depend on whether it is 1")
        return None
    ends = given.get("start"), given.get("end")
    if not any(isinstance(value, Sym) for value in (source.dims[axis], *ends)):
        return None
    if given.get("step", 1) != 1:
        raise InputError("slices of symbolic length have step 1")
    length = _slice_length(source.dims[axis], *ends)
    dims = list(source.dims)
    dims[axis] = length
    return TensorType(source.dtype, tuple(dims))


_SLICE = torch.ops.aten.slice.Tensor
_SELECT = torch.ops.aten.select.int
_SQUEEZES = (torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)


def _plain(frozen: Any) -> Any:
    return frozen.value if isinstance(frozen, _Leaf) else [_plain(item) for item in frozen[1]]


def _check_element(size: Dim, index: Dim) -> None:
    """Errors: `InputError` unless every size of the dim has this element."""
    if isinstance(size, int) or isinstance(index, Sym):
        return
    least = size.evaluate(lambda _: 1)
    if not -least <= index < least:
        raise InputError(f"whether {index} lies within {size} depends on {size}")


def _slice_length(size: Dim, start: Dim | None, end: Dim | None) -> Dim:
    """Length of ``[start:end]`` with a symbolic size or end, as a polynomial."""
    first = _from_front(size, 0 if start is None else start)
    last = size if end is None or end == 2**63 - 1 else _from_front(size, end)
    length = _minus(last, first)
    # Of a symbolic dim only the first and last element surely exist.
    fixed = isinstance(size, Sym) and isinstance(length, int)
    if fixed and (length != 1 or (first, last) not in ((0, 1), (_minus(size, 1), size))):
        raise InputError(f"whether [{start}:{end}] lies within {size} depends on {size}")
    return length


def _from_front(size: Dim, index: Dim) -> Dim:
    return _minus(size, -index) if isinstance(index, int) and index < 0 else index


def _minus(a: Dim, b: Dim) -> Dim:
    return make_dim(f"{a} - ({b})")


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
