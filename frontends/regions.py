"""Which nodes depend on a value, and which a value depends on."""

from __future__ import annotations

from collections.abc import Container

import torch.fx

from ..ir import Function, cone


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
