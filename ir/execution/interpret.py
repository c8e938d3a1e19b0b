"""The reference interpreter: runs a function on tensors, op by op.

IR values have a dtype and dims but no memory layout, so ``aten.view`` means ``aten.reshape``.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    fn = program.function(function)
    sizes = bind_symbols(fn, inputs)
    values: dict[torch.fx.Node, Any] = {}

    def value(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return values[arg]
        return arg.evaluate(sizes.__getitem__) if isinstance(arg, Sym) else arg

    last_use = last_uses(fn)
    with torch.no_grad():
        for node in fn:
            if node.op == "placeholder":
                values[node] = inputs[str(node.target)]
            elif node.op == "get_attr":
                values[node] = program.weights[str(node.target)].load()
            elif node.op == "call_function":
                args, kwargs = map_aggregate(node.args, value), map_aggregate(node.kwargs, value)
                op: Any = _WITHOUT_LAYOUT.get(node.target, node.target)
                values[node] = op(*args, **kwargs)
            for arg in node.all_input_nodes:
                if last_use[arg] is node and node.op != "output":
                    del values[arg]
    return {name: values[node] for name, node in fn.outputs.items()}
