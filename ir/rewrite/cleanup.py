"""Dead code and common subexpression elimination."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.fx

from ..function import Function


def sweep(fn: Function) -> int:
    """Remove nodes that no output needs, in place; returns their number."""
    removed = 0
    for node in reversed(list(fn.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            fn.graph.erase_node(node)
            removed += 1
    return removed


def merge_equal(fn: Function) -> int:
    """Merge equal calls, in place; returns the number of removed nodes."""
    first: dict[Hashable, torch.fx.Node] = {}
    merged = 0
    for node in fn:
        if node.op not in ("call_function", "get_attr") or not _is_pure(node.target):
            continue
        # Arguments come earlier, so they already point at the first of their equals.
        known = first.setdefault(_key(node), node)
        if known is node:
            continue
        fn.replace(node, known)
        merged += 1
    return merged


def _is_pure(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True  # a weight's name, or operator.getitem
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and not target._schema.is_mutable


def _key(node: torch.fx.Node) -> Hashable:
    return (node.op, node.target, _freeze(node.args), _freeze(node.kwargs))


def _freeze(value: Any) -> Hashable:
    if isinstance(value, torch.fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in sorted(value.items()))
    return (type(value).__name__, repr(value))
