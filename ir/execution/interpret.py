"""The reference interpreter: runs a function on tensors, op by op.

IR values have a dtype and dims but no memory layout, so ``aten.view`` means ``aten.reshape``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..function import Function, type_of
from ..program import Program
from ..support.errors import InputError
from ..types import Sym, TensorType
from .analysis import last_uses

_WITHOUT_LAYOUT: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


def bind_symbols(function: Function, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Sizes of the symbols, from the shapes of inputs. Errors: `InputError` naming an input that is
    missing or has another type."""
    sizes: dict[str, int] = {}
    for node in function.inputs:
        name = str(node.target)
        if name not in inputs:
            raise InputError(f"{function.name} needs the input {name!r}: {type_of(node)}")
        _match(name, type_of(node), inputs[name], sizes)
    return sizes


def _match(name: str, expected: TensorType, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
    got = TensorType.of(tensor)
    if got.dtype != expected.dtype or len(got.dims) != len(expected.dims):
        raise InputError(f"input {name!r}: expected {expected}, got {got}")
    for dim, size in zip(expected.dims, got.shape, strict=True):
        if isinstance(dim, Sym) and dim.plain:
            sizes.setdefault(dim.text, size)
        bound = dim.bind(sizes) if isinstance(dim, Sym) else dim
        if bound != size:
            raise InputError(f"input {name!r}: expected {expected} with {sizes}, got {got}")


def run(
    program: Program, function: str, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Outputs, with updated states, of a function. inputs: arguments and states. Errors:
    `InputError` for an input that is missing or has another type."""
    return Run(program, function, inputs).finished()


class Run:
    """A run of a function, which may stop on its way and go on more than once. Errors: see `run`.

    values: of the nodes that ran and are still to be read.
    """

    def __init__(self, program: Program, function: str, inputs: Mapping[str, torch.Tensor]) -> None:
        self.program, self.function, self.inputs = program, program.function(function), inputs
        self.sizes = bind_symbols(self.function, inputs)
        self.values: dict[torch.fx.Node, Any] = {}
        self.left = list(self.function)
        self.last_use = last_uses(self.function)

    def until(self, node: torch.fx.Node) -> None:
        """Run up to a node, which is the next one then."""
        count = self.left.index(node)
        now, self.left = self.left[:count], self.left[count:]
        self._run(now)

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Run:
        """The same run, to go on with other weights, which no node has read yet."""
        other = copy.copy(self)
        held = self.function.graph.find_nodes(op="get_attr")
        read = {n: weights[str(n.target)] for n in held if str(n.target) in weights}
        other.values = self.values | read
        other.left = [node for node in self.left if node not in read]
        return other

    def finished(self) -> dict[str, torch.Tensor]:
        """Run what is left. Outputs, with updated states."""
        now, self.left = self.left, []
        self._run(now)
        return {name: self.values[node] for name, node in self.function.outputs.items()}

    def _run(self, nodes: Sequence[torch.fx.Node]) -> None:
        values = self.values
        with torch.no_grad():
            for node in nodes:
                if node.op == "placeholder":
                    values[node] = self.inputs[str(node.target)]
                elif node.op == "get_attr":
                    values[node] = self.program.weights[str(node.target)].load()
                elif node.op == "call_function":
                    args = map_aggregate(node.args, self._value)
                    kwargs = map_aggregate(node.kwargs, self._value)
                    op: Any = _WITHOUT_LAYOUT.get(node.target, node.target)
                    values[node] = op(*args, **kwargs)
                for arg in node.all_input_nodes:
                    if self.last_use[arg] is node and node.op != "output":
                        del values[arg]

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.values[arg]
        return arg.evaluate(self.sizes.__getitem__) if isinstance(arg, Sym) else arg
