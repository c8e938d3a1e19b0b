"""Types of values: a dtype and dims, each an int or a symbolic expression such as ``B`` or ``B*T``.

>>> t = TensorType.parse("f32[B,T,384]")
>>> t.dtype, t.dims[2], str(t)
(torch.float32, 384, 'f32[B,T,384]')
>>> t.bind({"B": 2, "T": 7}).dims
(2, 7, 384)
>>> str(Sym("B") * Sym("T") + 1)
'B*T + 1'
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch

from .support.errors import InputError

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES: dict[torch.dtype, str] = {v: k for k, v in DTYPES.items()}


@dataclass(frozen=True)
class Sym:
    """A symbolic integer: a polynomial over named symbols, kept as its canonical text.

    ``B``: batch size; ``T``: tokens per sequence of a step; ``C``: cache capacity in rows (``C.1``,
    ... for further classes of caches). A dim of a `TensorType`, or an argument of a node, so
    programs need no size-reading nodes.
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", str(_to_sympy(self.text)))

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the symbols in the expression."""
        return frozenset(s.name for s in _to_sympy(self.text).free_symbols)

    @property
    def plain(self) -> bool:
        """Whether the expression is one symbol."""
        return bool(_to_sympy(self.text).is_Symbol)

    def bind(self, values: Mapping[str, Dim]) -> Dim:
        """The expression with some symbols replaced; an int once none is left."""
        if all(type(values.get(name)) is int for name in self.symbols):
            # Called at every change of a step's width; sympy takes milliseconds.
            return int(self.evaluate(values.__getitem__))
        replaced = {sympy.Symbol(k): _to_sympy(str(v)) for k, v in values.items()}
        return make_dim(_to_sympy(self.text).subs(replaced, simultaneous=True))

    def evaluate(self, lookup: Callable[[str], Any]) -> Any:
        """Evaluate in any arithmetic. lookup: a symbol's value by name."""
        return _evaluate(_to_sympy(self.text), lookup)

    def __add__(self, other: Dim) -> Dim:
        return make_dim(_to_sympy(self.text) + _to_sympy(str(other)))

    def __sub__(self, other: Dim) -> Dim:
        return make_dim(_to_sympy(self.text) - _to_sympy(str(other)))

    def __mul__(self, other: Dim) -> Dim:
        return make_dim(_to_sympy(self.text) * _to_sympy(str(other)))

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        return self.text


Dim: TypeAlias = int | Sym


def make_dim(expr: Any) -> Dim:
    """A `Dim` from a sympy expression (or its text): an int when it is constant."""
    return _dim(str(expr))


@lru_cache(maxsize=4096)
def _dim(text: str) -> Dim:
    expr = _to_sympy(text)
    return int(expr) if expr.is_Integer else Sym(text)


# Bounds for untrusted text.
_DIM = re.compile(
    r"(?:\s*+(?:[A-Za-z_]\w*+(?:\.\d{1,9}+\b)?+|\d{1,19}+\b|\*\*|[-+*()]))++\s*+", re.ASCII
)
DOT = "\u00b7"
"""Replaces the dot of ``C.1`` in text that Python parses."""
_MAX_TEXT, _MAX_TERMS, _MAX_POWER = 200, 64, 8


@lru_cache(maxsize=4096)
def _to_sympy(text: str) -> Any:
    if len(text) > _MAX_TEXT:
        raise InputError(f"a dimension of {len(text)} characters; {_MAX_TEXT} are allowed")
    if not _DIM.fullmatch(text):
        raise _no_dim(text)
    try:
        tree = ast.parse(text.strip().replace(".", DOT), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _no_dim(text) from None
    return _from_ast(tree, text)


def _no_dim(text: str) -> InputError:
    return InputError(
        f"not a dimension: {text!r}; expected a polynomial of integers and names, such as B*T + 1"
    )


def _from_ast(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name):
        return sympy.Symbol(node.id.replace(DOT, "."))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_from_ast(node.operand, text)
    if not isinstance(node, ast.BinOp):
        raise _no_dim(text)
    left, right = _from_ast(node.left, text), _from_ast(node.right, text)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    terms = len(sympy.Add.make_args(left)) * len(sympy.Add.make_args(right))
    if isinstance(node.op, ast.Mult) and terms <= _MAX_TERMS:
        return sympy.expand(left * right)
    power = isinstance(node.op, ast.Pow) and left.is_Symbol and right.is_Integer
    if power and 2 <= int(right) <= _MAX_POWER:
        return left**right
    raise _no_dim(text)


def _evaluate(expr: Any, lookup: Callable[[str], Any]) -> Any:
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return lookup(expr.name)
    parts = [_evaluate(arg, lookup) for arg in expr.args]
    result = parts[0]
    for part in parts[1:]:
        if expr.is_Add:
            result = result + part
        elif expr.is_Mul:
            result = result * part
        else:
            result = result**part
    return result


@dataclass(frozen=True)
class TensorType:
    """dtype and dims of a tensor. Prints as ``f32[B,T,384]``; a scalar tensor is ``f32[]``."""

    dtype: torch.dtype
    dims: tuple[Dim, ...]

    @classmethod
    def parse(cls, text: str) -> TensorType:
        """Parse ``dtype[dim,dim]``. Errors: `InputError`."""
        name, bracket, rest = text.strip().partition("[")
        if name not in DTYPES or not bracket or not rest.endswith("]"):
            raise InputError(
                f"not a tensor type: {text!r}; expected dtype[dims], e.g. f32[B,T,384], "
                f"with dtype one of {', '.join(DTYPES)}"
            )
        dims = [part for part in rest[:-1].split(",") if part.strip()]
        return cls(DTYPES[name], tuple(make_dim(part.strip()) for part in dims))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        """The type of a concrete tensor."""
        return cls(tensor.dtype, tuple(int(n) for n in tensor.shape))

    def bind(self, values: Mapping[str, Dim]) -> TensorType:
        """The type with some symbols replaced."""
        dims = tuple(d.bind(values) if isinstance(d, Sym) else d for d in self.dims)
        return TensorType(self.dtype, dims)

    def with_dtype(self, dtype: torch.dtype) -> TensorType:
        """Same dims, another dtype."""
        return TensorType(dtype, self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims as ints. Errors: `InputError` if one is symbolic."""
        if any(isinstance(d, Sym) for d in self.dims):
            raise InputError(f"{self} has symbolic dims; bind them before asking for a shape")
        return tuple(d for d in self.dims if isinstance(d, int))

    @property
    def nbytes(self) -> int:
        """Size of a dense tensor of this type, in bytes."""
        count = 1
        for n in self.shape:
            count *= n
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        dims = ",".join(str(d).replace(" ", "") for d in self.dims)
        return f"{DTYPE_NAMES[self.dtype]}[{dims}]"


ValueType: TypeAlias = TensorType | tuple[Any, ...]
"""Type of a node's value: a tensor, or a tuple of them for ops with several results."""


def leaves(value: Any) -> Iterator[Any]:
    """The items of nested lists, tuples and dicts, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        yield value
        return
    for item in value:
        yield from leaves(item)


def type_text(value_type: ValueType) -> str:
    """Text of a `ValueType`: ``f32[2]`` or ``(f32[2], i64[])``."""
    if isinstance(value_type, TensorType):
        return str(value_type)
    return "(" + ", ".join(type_text(t) for t in value_type) + ")"
