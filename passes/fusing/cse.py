"""Common subexpression elimination: one node where several compute the same value.

Before::

    %a: f32[B,1,T,4] = aten.unsqueeze(%cos, 1)
    %b: f32[B,1,T,4] = aten.unsqueeze(%cos, 1)
    %y: f32[B,1,T,4] = aten.mul.Tensor(%a, %b)

After::

    %a: f32[B,1,T,4] = aten.unsqueeze(%cos, 1)
    %y: f32[B,1,T,4] = aten.mul.Tensor(%a, %a)

Two calls are the same when op, arguments and types of numbers agree (``1`` is not ``1.0``, and
operands in another order count as different). References to one weight become one. Leaves ops
alone that draw random numbers or write to an argument.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import Function, Program
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_each


@register
class Cse(Pass):
    """No options."""

    name: ClassVar[str] = "cse"

    def run(self, program: Program) -> Outcome:
        """Merge equal calls in every function. See the module docstring."""
        return edit_each(program, lambda fn: merge_equal(fn) or "no two calls compute the same")


def merge_equal(fn: Function) -> int:
    """Merge equal calls in place (hand in a copy); returns how many nodes went."""
    first: dict[Hashable, torch.fx.Node] = {}
    merged = 0
    for node in fn:
        if node.op not in ("call_function", "get_attr") or not _is_pure(node.target):
            continue
        # Arguments come earlier, so they already point at the first of their equals.
        known = first.setdefault(_key(node), node)
        if known is node:
            continue
        node.replace_all_uses_with(known)
        fn.graph.erase_node(node)
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
