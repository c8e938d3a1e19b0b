"""What a traced program must be so that it can later run token by token over a cache.

Tokens may meet in attention only. Everything else must treat each token alike, whatever its place
in the step, so that T tokens at once and T steps of one token compute the same. The checks follow
the axis whose size holds T through every op and refuse an op that mixes along it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ..ir import Dim, Function, Sym, TensorType, UnsupportedError
from .aten import CORE
from .sites import where

A = torch.ops.aten

_REDUCING = {A.mean.dim, A.sum.dim_IntList, A.amax.default}
_ALONG = {
    A._softmax.default: 1,
    A.cumsum.default: 1,
    A.max.dim: 1,
    A.argmax.default: 1,
    A.cat.default: 1,
    A.select.int: 1,
    A.slice.Tensor: 1,
    A.gather.default: 1,
    A.scatter.src: 1,
    A.scatter.value: 1,
    A.topk.default: 2,
    A.sort.default: 1,
}
"""Ops that work along one axis, and where in their arguments the axis stands."""

_TAKES_SIZES = {A.reshape.default, A.expand.default, A.full.default, A.slice.Tensor}


def check_traced(fn: Function) -> None:
    """Verify a frontend's function. Errors: `UnsupportedError` naming op, module and line."""
    for node in fn.calls():
        problem = _problem(node)
        if problem:
            raise UnsupportedError(f"{where(node)}: {node.target} {problem}; not supported yet")


def _problem(node: torch.fx.Node) -> str:
    target = node.target
    if target is A.arange.start_step:
        return "numbers the tokens of a step by itself instead of using their positions"
    if getattr(target, "namespace", "") == "aten" and target not in CORE:
        return "is no op that programs are made of"
    if _symbolic(node) and target not in _TAKES_SIZES:
        return "computes with the number of tokens in a step"
    if _mixes(node):
        return "mixes tokens outside of attention"
    return ""


def _symbolic(node: torch.fx.Node) -> bool:
    found: list[Sym] = []
    torch.fx.node.map_aggregate(
        (node.args, node.kwargs), lambda a: found.append(a) if isinstance(a, Sym) else None
    )
    return bool(found)


def _mixes(node: torch.fx.Node) -> bool:
    target = node.target
    source = _first_type(node)
    if source is None:
        return False
    if target in _REDUCING:
        axes: Any = node.args[1]
        return any(_has_tokens(source.dims[axis]) for axis in axes)
    if target in _ALONG:
        index = _ALONG[target]
        axis: Any = node.args[index] if index < len(node.args) else -1
        return _has_tokens(source.dims[axis])
    if target is A.matmul.default:
        return _has_tokens(source.dims[-1])
    if target is A.index.Tensor:
        indices: Any = node.args[1]
        indexed = zip(source.dims, indices, strict=False)
        return any(_has_tokens(dim) for dim, index in indexed if index is not None)
    if target is A.embedding.default:
        return _has_tokens(source.dims[0])
    return False


def _first_type(node: torch.fx.Node) -> TensorType | None:
    found: Any = node.args[0] if node.args else None
    if isinstance(found, (list, tuple)):
        found = found[0]
    value = found.meta.get("type") if isinstance(found, torch.fx.Node) else None
    return value if isinstance(value, TensorType) else None


def _has_tokens(dim: Dim) -> bool:
    return isinstance(dim, Sym) and "T" in dim.symbols
