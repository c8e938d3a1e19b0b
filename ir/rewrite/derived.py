"""Weights computed by a piece of a function, which is stored as text.

Names in the text are normalized, so pieces with the same calls in the same order have equal texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..function import Function, cone, type_of
from ..support.errors import InputError
from ..text.parser import parse_function
from ..text.printer import function_text
from ..types import TensorType
from ..weights import Call, Weight, WeightStore, derivation, derive
from .subgraph import evaluate


def evaluated_piece(name: str, node: torch.fx.Node, weights: Mapping[str, Weight]) -> Weight:
    """A node that depends on no input, as a weight."""
    text, sources = _portable(node, {})
    given = (weights[source] for source in sources)
    return derive(name, type_of(node), evaluated, *given, function=text)


def tabulated_piece(
    name: str,
    type: TensorType,
    node: torch.fx.Node,
    weights: Mapping[str, Weight],
    source: str,
    axis: int,
) -> Weight:
    """A weight [R,W] whose row p is a node's value for input p in 0..R-1. source: the input
    i64[B,T]. axis: of the value, T."""
    text, sources = _portable(node, {source: TensorType.parse("i64[B,T]")})
    given = (weights[part] for part in sources)
    options = {"function": text, "source": source, "rows": type.shape[0], "axis": axis}
    return derive(name, type, tabulated, *given, **options)


@derivation
def evaluated(*tensors: torch.Tensor, function: str) -> torch.Tensor:
    """The value of a function without inputs of weights w0, w1, ..."""
    return _run(function, tensors, {})


@derivation
def tabulated(
    *tensors: torch.Tensor, function: str, source: str, rows: int, axis: int
) -> torch.Tensor:
    """The values of a function for 0..rows-1 at its input `source`, as rows."""
    found = _run(function, tensors, {source: torch.arange(rows)[None]})
    return found.movedim(axis, 0).reshape(rows, -1)


def _run(
    text: str, tensors: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    named = {f"w{i}": tensor for i, tensor in enumerate(tensors)}
    types = WeightStore({name: Weight.of(name, tensor) for name, tensor in named.items()})
    try:
        return evaluate(parse_function(text, types), named, inputs)["value"]
    except (IndexError, RuntimeError) as error:  # raised by torch for weights that are too short
        raise InputError(f"weights cannot be made of others: {error}") from error


def _portable(node: torch.fx.Node, inputs: Mapping[str, TensorType]) -> tuple[str, list[str]]:
    """A function that computes a node, as text, and the names of its weights in order."""
    fn, names = Function("piece"), list[str]()
    copies: dict[torch.fx.Node, Any] = {}
    given = {name: fn.add_input(name, type) for name, type in inputs.items()}

    def copied(arg: Any) -> Any:
        return copies[arg] if isinstance(arg, torch.fx.Node) else arg

    for part in sorted(cone([node])):  # fx nodes compare by their place in the graph
        if part.op == "placeholder":
            copies[part] = given[str(part.target)]
        elif part.op == "get_attr":
            names.append(str(part.target))
            copies[part] = fn.weight(Weight(f"w{len(names) - 1}", type_of(part), Call(_none)))
        else:
            args: Any = map_aggregate(part.args, copied)
            kwargs: Any = map_aggregate(part.kwargs, copied)
            granted = part.meta.get("granted", False)
            target: Any = part.target
            name = f"v{len(copies)}"
            copies[part] = fn.call(target, *args, name=name, granted=granted, **kwargs)
    fn.set_outputs({"value": copies[node]})
    return function_text(fn), names


def _none() -> torch.Tensor:
    raise AssertionError("a placeholder for printing has no data")
