"""Which nodes depend on a value, which a value depends on, and what that is."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch.fx
from torch.fx.node import map_aggregate

from ..ir import Function, Sym, UnsupportedError, Weight, cone
from .sites import where


def reached_from(fn: Function, source: torch.fx.Node) -> set[torch.fx.Node]:
    """The source and every call that depends on it."""
    reached = {source}
    for node in fn.calls():
        if any(arg in reached for arg in node.all_input_nodes):
            reached.add(node)
    return reached


def needed_for(node: torch.fx.Node, known: Container[torch.fx.Node]) -> list[torch.fx.Node]:
    """The nodes to run for a node's value, in graph order, when some values are known."""
    wanted = cone([node], known)
    return [current for current in node.graph.nodes if current in wanted and current not in known]


def evaluated(
    end: torch.fx.Node,
    weights: Mapping[str, Weight],
    sizes: Mapping[str, int],
    known: Mapping[torch.fx.Node, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The value of a node for these sizes of symbols; only what is needed is computed.

    known: values that are given. Errors: `UnsupportedError` for a node that depends on an input
    without a value, or naming the op that torch cannot run.
    """
    values: dict[torch.fx.Node, Any] = dict(known or {})

    def bound(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return values[arg]
        return arg.evaluate(sizes.__getitem__) if isinstance(arg, Sym) else arg

    for node in needed_for(end, values):
        if node.op == "get_attr":
            values[node] = weights[str(node.target)].load()
        elif node.op == "call_function":
            args, kwargs = map_aggregate(node.args, bound), map_aggregate(node.kwargs, bound)
            try:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except RuntimeError as error:  # of types that torch traces and has no kernel for
                raise UnsupportedError(f"{where(node)}: cannot be run: {error}") from error
        else:
            raise UnsupportedError(f"{where(end)}: {end.target} depends on {node.target}")
    result: torch.Tensor = values[end]
    return result
