"""Facts about functions: when values die, how much memory a step needs, what dominates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx

from ..function import Function
from ..program import Program
from ..support.errors import GraftworkError, UnsupportedError
from ..types import TensorType


def is_repeatable(function: Function) -> bool:
    """Whether a second run on the same inputs writes what the first did: not where rows of a state
    are taken up and put back changed, as the stream's are between parts of a cut step."""
    reads = function.calls(torch.ops.graftwork.cache_read.default)
    return not any(str(node.all_input_nodes[0].target) in function.outputs for node in reads)


def part_of(program: Program) -> tuple[int, int]:
    """Which part of how many a program is; (0, 1) for a whole one."""
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


@dataclass(frozen=True)
class Liveness:
    """Live memory along a function.

    live: bytes alive while each call runs, arguments and result included. peak: the largest of
    these. at: the call where it is reached (None for a function without calls).
    """

    live: Mapping[torch.fx.Node, int]
    peak: int
    at: torch.fx.Node | None


def liveness(function: Function, sizes: Mapping[str, int]) -> Liveness:
    """Memory of inputs, states and results when every value is freed after its last use.

    sizes: a number for every symbol, such as ``{"B": 1, "T": 1, "C": 2048}``. Weights are not
    counted, and views count like copies. Errors: `GraftworkError` naming a symbol without a size.
    """
    if missing := function.symbols() - set(sizes):
        raise GraftworkError(f"liveness needs sizes for {', '.join(sorted(missing))}")
    last = last_uses(function)
    dying: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for value, user in last.items():
        dying.setdefault(user, []).append(value)
    held = sum(_nbytes(node, sizes) for node in function.inputs)
    live: dict[torch.fx.Node, int] = {}
    for node in function:
        if node.op == "call_function":
            held += _nbytes(node, sizes)
            live[node] = held
        dead = [*dying.get(node, []), *([] if node in last or node.op == "output" else [node])]
        held -= sum(_nbytes(value, sizes) for value in dead if value.op != "get_attr")
    at = max(live, key=live.__getitem__, default=None)
    return Liveness(live, 0 if at is None else live[at], at)


def _nbytes(node: torch.fx.Node, sizes: Mapping[str, int]) -> int:
    """Bytes of a value; results that are taken out of a tuple are counted with the tuple."""
    if node.op == "call_function" and not hasattr(node.target, "_schema"):
        return 0
    return _type_bytes(node.meta["type"], sizes)


def _type_bytes(value_type: Any, sizes: Mapping[str, int]) -> int:
    if isinstance(value_type, TensorType):
        return value_type.bind(sizes).nbytes
    return sum(_type_bytes(part, sizes) for part in value_type)


def dominating_chain(
    function: Function, source: str = "tokens", sink: str = "logits"
) -> list[torch.fx.Node]:
    """Values that every path from an input to an output crosses, in order, both ends included.

    Errors: `UnsupportedError` if the output does not depend on the input.
    """
    import networkx  # late: it takes a while, and few need it

    start, end = function.input(source), function.outputs[sink]
    graph = networkx.DiGraph()
    graph.add_nodes_from((start, end))
    for node in function:
        graph.add_edges_from((arg, node) for arg in node.all_input_nodes)
    dominators = networkx.immediate_dominators(graph, start)
    if end not in dominators:
        raise UnsupportedError(f"{function.name}: {sink} does not depend on {source}")
    chain = [end]
    while chain[-1] is not start:
        chain.append(dominators[chain[-1]])
    return chain[::-1]
