"""Facts about functions: last uses, dominators, whether a run can be repeated."""

from __future__ import annotations

import torch.fx

from ..function import Function
from ..program import Program
from ..support.errors import UnsupportedError


def is_repeatable(function: Function) -> bool:
    """Whether a second run on the same inputs writes the same rows. False if rows of a state are
    read, changed and written back, as the residual stream's between segments of a cut step."""
    reads = function.calls(torch.ops.graftwork.cache_read.default)
    return not any(str(node.all_input_nodes[0].target) in function.outputs for node in reads)


def part_of(program: Program) -> tuple[int, int]:
    """A tensor-parallel program's part and the number of parts; (0, 1) if it is whole."""
    ops = torch.ops.graftwork.all_reduce.default, torch.ops.graftwork.all_gather.default
    for function in program.functions.values():
        for node in function.calls(*ops):
            return int(str(node.kwargs["part"])), int(str(node.kwargs["parts"]))
    return 0, 1


def blocks_of(function: Function, point: str = "block") -> dict[int, torch.fx.Node]:
    """The states behind a function's layers, in order, by the layer's number. point: or another
    point of each layer that is marked, such as "attention"."""
    markers = function.calls(torch.ops.graftwork.hidden.default)
    return {int(n.kwargs["layer"]): n for n in markers if n.kwargs["point"] == point}  # type: ignore[arg-type]


def last_uses(function: Function) -> dict[torch.fx.Node, torch.fx.Node]:
    """The last user of every value, in graph order (values without users are left out)."""
    return {arg: node for node in function for arg in node.all_input_nodes}


def dominating_chain(function: Function) -> list[torch.fx.Node]:
    """Nodes on every path from the input tokens to the output logits, in order, both included.
    Errors: `UnsupportedError` if the logits do not depend on the tokens."""
    import networkx  # late import: slow, and rarely needed

    start, end = function.input("tokens"), function.outputs["logits"]
    graph = networkx.DiGraph()
    graph.add_nodes_from((start, end))
    for node in function:
        graph.add_edges_from((arg, node) for arg in node.all_input_nodes)
    dominators = networkx.immediate_dominators(graph, start)
    if end not in dominators:
        raise UnsupportedError(f"{function.name}: logits does not depend on tokens")
    chain = [end]
    while chain[-1] is not start:
        chain.append(dominators[chain[-1]])
    return chain[::-1]
