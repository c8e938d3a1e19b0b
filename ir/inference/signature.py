"""Checks of arguments against an op's schema.

Torch does not always check: it crashes on a symbolic size in the place of a dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..types import Sym, TensorType, type_text

# By the kind of a schema's type: types of arguments, and words for messages.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    # Torch makes tensors of numbers: ``mul(x, 2)``.
    "TensorType": ((TensorType, int, float, Sym), "a tensor"),
    "NumberType": ((int, float, Sym), "a number"),
    "IntType": ((int,), "an integer"),
    "SymIntType": ((int, Sym), "a size"),
    "FloatType": ((int, float), "a number"),
    "BoolType": ((bool,), "True or False"),
    "StringType": ((str,), "a string"),
    "ScalarTypeType": ((torch.dtype,), "a dtype"),
    "DeviceObjType": ((torch.device,), "a device"),
    "LayoutType": ((torch.layout,), "a layout"),
    "MemoryFormatType": ((torch.memory_format,), "a memory format"),
}


@lru_cache(maxsize=4096)
def _parameters(target: Any) -> tuple[tuple[str, Any, bool], ...]:
    arguments = target._schema.arguments
    return tuple((a.name, a.real_type, bool(a.kwarg_only)) for a in arguments)


def mismatch(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Description of the first argument that does not fit the op's schema; None if all fit. Tensors
    are given as `TensorType`."""
    parameters = _parameters(target)
    positional = [(name, kind) for name, kind, only in parameters if not only]
    if len(args) > len(positional):
        return f"it takes {len(positional)} positional arguments, not {len(args)}"
    given = dict(zip((name for name, _ in positional), args, strict=False))
    if twice := given.keys() & kwargs.keys():
        return f"{', '.join(sorted(twice))} is given twice"
    given.update(kwargs)
    kinds = {name: kind for name, kind, _ in parameters}
    for name, value in given.items():
        if name not in kinds:
            return f"it has no argument {name!r}; it has {', '.join(kinds)}"
        if not _fits(value, kinds[name]):
            return f"{name} must be {_words(kinds[name])}, not {_shown(value)}"
    return None


def placed(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Normalize a call's arguments: positional where the schema allows it. They must fit, see
    `mismatch`."""
    if not hasattr(target, "_schema"):
        return tuple(args), dict(kwargs)
    rest = [a for a in target._schema.arguments[len(args) :] if not a.kwarg_only]
    last = max((i for i, a in enumerate(rest) if a.name in kwargs), default=-1)
    named = {a.name: kwargs.get(a.name, a.default_value) for a in rest[: last + 1]}
    left = {name: value for name, value in kwargs.items() if name not in named}
    return (*args, *named.values()), left


def _fits(value: Any, kind: Any) -> bool:
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(value, kind.getElementType())
    if name == "ListType":
        inner = kind.getElementType()
        # Torch widens a single integer to a list, as in ``mean(x, -1)``.
        single = isinstance(value, int) and inner.kind() in ("IntType", "SymIntType")
        return single or (isinstance(value, list) and all(_fits(v, inner) for v in value))
    if isinstance(value, bool):
        return name in ("BoolType", "NumberType", "TensorType")
    return name in _KINDS and isinstance(value, _KINDS[name][0])


def _words(kind: Any) -> str:
    name = kind.kind()
    if name == "OptionalType":
        return f"{_words(kind.getElementType())} or None"
    if name == "ListType":
        return f"a list ({_words(kind.getElementType())} each)"
    return _KINDS[name][1] if name in _KINDS else f"a {name}, which programs cannot hold"


def _shown(value: Any) -> str:
    if isinstance(value, TensorType):
        return f"the tensor {value}"
    if isinstance(value, tuple) and value and isinstance(value[0], TensorType):
        return f"all results {type_text(value)} of an op; take one"
    return f"the size {value}" if isinstance(value, Sym) else repr(value)
