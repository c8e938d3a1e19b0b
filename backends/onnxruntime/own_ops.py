"""graftwork's own kernels as ops of ONNX: their names, and operands as the library reads them."""

from __future__ import annotations

import ctypes
import functools
import re

import torch

from ...ir import types as ir_types
from ...ir.ops import OpDef
from ...ir.ops.declared import parts
from ..cached_library import SHARED, library
from ..own_kernels import entries, own_ops, zero_of
from .emit import DTYPES


def own_library() -> str:
    """Where the library is that has the kernels and, with them, the ops. Errors: as `library`."""
    return _declared(library(SHARED))


@functools.cache
def _declared(kernels: ctypes.CDLL) -> str:
    for name, text, kernel in declarations():
        kernels.declare_op(name.encode(), text.encode(), ctypes.byref(entries(kernel)))
    return kernels._name


def declarations() -> list[tuple[str, str, str]]:
    """What the library is told of its ops: each one's name in ONNX, declaration and kernel."""
    shown = [op for op in own_ops() if op.native is not None]
    return [(node_name(op), described(op), op.name) for op in shown]


def node_name(op: OpDef) -> str:
    """What the op is called in graftwork's domain of ONNX: `attend_rows` is AttendRows."""
    return "".join(word.capitalize() for word in op.name.split("_"))


def described(op: OpDef) -> str:
    """The op's declaration as `kernels/ort_declared.h` reads it."""
    named = {name: kind for name, kind, _ in op.declared.operands}
    places = [name for name in op.declared.names if name in named]
    elements = {name: _element(kind) for name, kind in named.items()}
    lines = []
    for argument in op.overload._schema.arguments[: len(places)]:
        absent = int(str(argument.type).startswith("Optional"))
        lines.append(f"operand {argument.name} {elements[argument.name]} {absent}")
    for item in op.declared.items:
        if rule := _rule(item, places):
            lines.append(rule)
    for result in op.declared.results:
        _, kind, axes = parts(result)
        like = axes in named
        dtype = elements.get(axes if like else kind) or _element(kind)
        lines.append(f"like {dtype} {places.index(axes)}" if like else f"result {dtype} {axes}")
    assert op.native is not None
    lines += [f"size {axis}" for axis in op.native.sizes]
    for name, zero in zero_of(op).items():
        lines.append(f"{'number' if isinstance(zero, float) else 'whole'} {name}")
    return "\n".join(lines)


def _element(kind: str) -> int:
    """ONNX's number of a dtype."""
    return int(DTYPES[torch.float32 if kind in ("", "float") else ir_types.DTYPES[kind]])


def _rule(item: str, places: list[str]) -> str:
    """What one item of a declaration asks; "" where the kernel itself has to."""
    if ": " in item:
        name, _, axes = parts(item)
        return f"fit {places.index(name)} {axes}"
    if found := re.fullmatch(r"(\w) % (\w)", item):
        return "multiple " + " ".join(found.groups())
    if found := re.fullmatch(r"(\w) >= 1", item):
        return "least " + found[1]
    if found := re.fullmatch(r"(\w) = (\w) - (\d+)", item):
        return "less " + " ".join(found.groups())
    if found := re.fullmatch(r"(\w) = ([\w *+/]+)", item):
        return f"made {found[1]} {found[2].replace(' ', '').replace('//', '/')}"
    if re.fullmatch(r"[a-z]\w+ >= 1", item):  # an option: its kernel asks
        return ""
    assert item == "also", f"{item!r} of an op's declaration has no form in C++"
    return ""
