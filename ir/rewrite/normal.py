"""Normal form of ATen calls, for pattern matching.

IR values have no memory layout, so ``view`` is ``reshape``, a clone is the value itself and
``transpose`` is a ``permute``. `normal_call` gives a call's kind and its arguments by name:
defaults filled in, axes counted from the end, reshapes by the dims of their result.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ..function import arguments
from ..types import Dim, TensorType

A = torch.ops.aten

IDENTITIES = frozenset(
    {
        A.alias.default,
        A.clone.default,
        A.contiguous.default,
        A.detach.default,
        A.lift_fresh.default,
        A.lift_fresh_copy.default,
    }
)
_FAMILIES: dict[Any, Any] = {
    A._unsafe_view.default: A.reshape.default,
    A.softmax.int: A._softmax.default,
    A.squeeze.default: A.reshape.default,
    A.squeeze.dim: A.reshape.default,
    A.squeeze.dims: A.reshape.default,
    A.t.default: A.permute.default,
    A.transpose.int: A.permute.default,
    A.view.default: A.reshape.default,
}
# Calls determined by their first argument and the dims of their result.
_BY_RESULT = frozenset({A.reshape.default, A.expand.default})
# Arguments about storage and computation that do not change values.
_IGNORED = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit", "cudnn_enable"}
)
_AXES = frozenset({"dim", "dim0", "dim1"})
_END = 2**63 - 1


@dataclass(frozen=True)
class NormalCall:
    """kind: representative target of a family. arguments: by name, in the schema's order."""

    kind: Any
    arguments: Mapping[str, Any]


def kind_of(target: Any) -> Any:
    """The representative target of an op's variants."""
    return _FAMILIES.get(target, target)


def normal_call(node: torch.fx.Node) -> NormalCall:
    """The normal form of a ``call_function`` node; it and its tensor arguments have types."""
    kind = kind_of(node.target)
    if node.target is operator.getitem:
        return NormalCall(kind, {"source": node.args[0], "index": node.args[1]})
    named = arguments(node)
    rank = _rank(named)
    if kind in _BY_RESULT:
        return NormalCall(kind, {"source": named["self"], "dims": list(_dims(node))})
    if kind is A.permute.default and rank is not None:
        return NormalCall(kind, {"source": named["self"], "order": _order(named, rank)})
    if rank is not None:
        rank += kind in (A.unsqueeze.default, A.stack.default)
        for axis in _AXES & set(named):
            named[axis] = _from_end(named[axis], rank)
    if kind is A.slice.Tensor:
        _normal_ends(named)
    if kind is A._softmax.default:
        wide = named.get("dtype") is not None or bool(named.get("half_to_float"))
        named = {"self": named["self"], "dim": named["dim"], "wide": wide}
    return NormalCall(kind, {k: v for k, v in named.items() if k not in _IGNORED})


def _dims(node: Any) -> tuple[Dim, ...]:
    value_type = node.meta.get("type") if isinstance(node, torch.fx.Node) else None
    return value_type.dims if isinstance(value_type, TensorType) else ()


def _rank(named: Mapping[str, Any]) -> int | None:
    first = next(iter(named.values()), None)
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    known = isinstance(first, torch.fx.Node) and isinstance(first.meta.get("type"), TensorType)
    return len(_dims(first)) if known else None


def _from_end(axis: Any, rank: int) -> Any:
    if isinstance(axis, (list, tuple)):
        return [_from_end(item, rank) for item in axis]
    return axis - rank if isinstance(axis, int) and axis >= 0 else axis


def _order(named: Mapping[str, Any], rank: int) -> list[int]:
    """The new order of the axes, counted from the end; leading axes that stay are left out."""
    order = list(range(-rank, 0))
    if "dims" in named:
        order = [_from_end(axis, rank) for axis in named["dims"]]
    else:
        one, two = named.get("dim0", -2), named.get("dim1", -1)
        order[one], order[two] = order[two], order[one]
    moved = [i for i, axis in enumerate(order) if axis != i - rank]
    return order[moved[0] :] if moved else []


def _normal_ends(named: dict[str, Any]) -> None:
    """Missing ends are the ends of the axis; a start counted from the end is counted from 0."""
    dims, axis = _dims(named["self"]), named["dim"]
    size = dims[axis] if dims else None
    start, end = named["start"], named["end"]
    if isinstance(start, int) and start < 0 and isinstance(size, int):
        start += size
    whole = isinstance(end, int) and isinstance(size, int) and end >= size
    if whole or end in (size, _END):
        end = None
    named["start"], named["end"] = start or 0, end
