"""Builds the program's function call by call, computing on weights alone whatever can be.

A call whose tensor arguments are all weights (``1 + norm.weight``, the transpose of a Conv1D
weight, a table of frequencies) becomes a new, lazily derived weight, so a program holds no constant
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..ir import NOWHERE, Dim, Function, Site, Sym, TensorType, Weight, type_of
from ..ir.inference.infer import infer
from ..ir.weights import Call, Operand, computed

A = torch.ops.aten


class Builder:
    """A function under construction: appends calls at `site` and collects weights."""

    def __init__(self, name: str) -> None:
        self.fn = Function(name)
        self.site: Site = NOWHERE
        self.weights: dict[str, Weight] = {}
        self._nodes: dict[str, torch.fx.Node] = {}
        self._folded: dict[str, torch.fx.Node] = {}
        self._permuted: dict[torch.fx.Node, tuple[torch.fx.Node, list[int]]] = {}

    def weight(self, weight: Weight) -> torch.fx.Node:
        """The node of a weight; one a weight, at the place of its first use."""
        if weight.name not in self._nodes:
            self.weights[weight.name] = weight
            self._nodes[weight.name] = self.fn.weight(weight)
        return self._nodes[weight.name]

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A typed call, or the derived weight that stands for it."""
        inputs = tensors_in((args, kwargs))
        constant = all(node.op == "get_attr" for node in inputs)
        if constant and not _symbolic((args, kwargs)):
            folded = self._fold(target, args, kwargs, inputs)
            if folded is not None:
                return folded
        return self.fn.call(target, *args, site=self.site, **kwargs)

    def _fold(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.fx.Node],
    ) -> torch.fx.Node | None:
        result = infer(target, args, kwargs)
        if not isinstance(result, TensorType):
            return None
        key = f"{target}{args}{kwargs}"
        if key not in self._folded:
            place: dict[Any, Any] = {node: Operand(index) for index, node in enumerate(inputs)}
            operands: Any = map_aggregate((args, kwargs), lambda a: place.get(a, a))
            base = str(inputs[0].target) if inputs else "constant"
            name = self._free_name(f"{base}.{_short(target)}")
            sources = [self.weights[str(node.target)] for node in inputs]
            made = computed(name, result, Call(target, *operands), *sources)
            self._folded[key] = self.weight(made)
        return self._folded[key]

    def _free_name(self, name: str) -> str:
        taken = sum(1 for known in self.weights if known == name or known.startswith(f"{name}."))
        return f"{name}.{taken}" if taken else name

    # -- shorthands that leave out what changes nothing

    def shape(self, node: torch.fx.Node) -> list[Dim]:
        """Dims of a node's value."""
        return list(type_of(node).dims)

    def cast(self, node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        """The value in another dtype."""
        if type_of(node).dtype == dtype:
            return node
        return self.call(A._to_copy.default, node, dtype=dtype)

    def reshape(self, node: torch.fx.Node, shape: list[Dim]) -> torch.fx.Node:
        """The same elements in other dims."""
        if self.shape(node) == shape:
            return node
        if node.target is A.reshape.default:
            source: Any = node.args[0]
            return self.reshape(source, shape)
        return self.call(A.reshape.default, node, shape)

    def permute(self, node: torch.fx.Node, order: list[int]) -> torch.fx.Node:
        """Axes in another order; two permutations in a row become one."""
        order = [axis % len(order) for axis in order]
        if node.target is A.permute.default:
            source: Any = node.args[0]
            inner: Any = node.args[1]
            return self.permute(source, [inner[axis] for axis in order])
        if node in self._permuted:
            source, inner = self._permuted[node]
            return self.permute(source, [inner[axis] for axis in order])
        if order == sorted(order):
            return node
        result = self.call(A.permute.default, node, order)
        if result.op == "get_attr":
            self._permuted[result] = (node, order)
        return result

    def slice(self, node: torch.fx.Node, axis: int, start: Dim, stop: Dim) -> torch.fx.Node:
        """Elements start..stop of an axis."""
        size = self.shape(node)[axis]
        if start == 0 and stop == size:
            return node
        return self.call(A.slice.Tensor, node, axis, start, stop)

    def expand(self, node: torch.fx.Node, shape: list[Dim]) -> torch.fx.Node:
        """Axes of size 1 repeated."""
        if self.shape(node) == shape:
            return node
        return self.call(A.expand.default, node, shape)

    def stack(self, nodes: list[torch.fx.Node], axis: int) -> torch.fx.Node:
        """Values side by side along a new axis."""
        parts = [self.call(A.unsqueeze.default, node, axis) for node in nodes]
        return self.call(A.cat.default, parts, axis)


def tensors_in(value: Any) -> list[torch.fx.Node]:
    """The nodes inside nested arguments, each once, in order."""
    found: dict[torch.fx.Node, None] = {}
    map_aggregate(value, lambda a: found.setdefault(a) if isinstance(a, torch.fx.Node) else None)
    return list(found)


def _symbolic(value: Any) -> bool:
    found: list[Sym] = []
    map_aggregate(value, lambda a: found.append(a) if isinstance(a, Sym) else None)
    return bool(found)


def _short(target: Any) -> str:
    return str(target).split(".")[-2].strip("_") if "." in str(target) else str(target)
