"""Facts about functions: when values die, how much memory a step needs, the residual stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import torch
import torch.fx

from .errors import GraftworkError
from .function import Function
from .types import Sym, TensorType

_ADD = torch.ops.aten.add.Tensor


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


@dataclass(frozen=True)
class StreamPoint:
    """A point of the residual stream: what a `graftwork.hidden` marker after `node` would say."""

    node: torch.fx.Node
    layer: int
    point: str


def dominating_chain(
    function: Function, source: str = "tokens", sink: str = "logits"
) -> list[torch.fx.Node]:
    """Values that every path from an input to an output crosses, in order, both ends included.

    Errors: `GraftworkError` if the output does not depend on the input.
    """
    start, end = function.input(source), function.outputs[sink]
    graph = networkx.DiGraph()
    graph.add_nodes_from((start, end))
    for node in function:
        graph.add_edges_from((arg, node) for arg in node.all_input_nodes)
    dominators = networkx.immediate_dominators(graph, start)
    if end not in dominators:
        raise GraftworkError(f"{function.name}: {sink} does not depend on {source}")
    chain = [end]
    while chain[-1] is not start:
        chain.append(dominators[chain[-1]])
    return chain[::-1]


def residual_stream(function: Function) -> list[StreamPoint]:
    """Where the residual stream is, found by its shape alone: for models without module names.

    The stream's values are the [B,T,H] values that all paths from tokens to logits cross: the skip
    connection lets no inner value of a block dominate. The attention of layer i, found by its
    `graftwork.attention`, lies between two of them: the one before it is the stream after block
    i - 1 (or the embedding), the first one that depends on it is the stream after its addition.
    Parallel blocks (attention and MLP side by side) have one addition, and so only "block" points.
    Errors: `GraftworkError` if there is no attention or a layer's attention has no addition.
    """
    attentions = _attentions(function)
    chain = [n for n in dominating_chain(function) if _is_stream(n)]
    width = Counter(n.meta["type"].dims[2] for n in chain).most_common(1)
    chain = [n for n in chain if n.meta["type"].dims[2] == width[0][0]]
    reach = _Reach(function, chain)
    before = [reach.last_before(node) for node in attentions.values()]
    after = [reach.first_after(node) for node in attentions.values()]
    if not chain or None in before or None in after:
        raise GraftworkError(
            f"{function.name}: no residual stream: some attention is not between two [B,T,H] "
            "values that every path from tokens to logits crosses"
        )
    ends = [*before[1:], _last_addition(chain, after[-1])]
    points = [StreamPoint(_known(before[0]), -1, "embedding")]
    for layer, added, end in zip(attentions, after, ends, strict=True):
        if added is not end:
            points.append(StreamPoint(_known(added), layer, "attention"))
        points.append(StreamPoint(_known(end), layer, "block"))
    return points


def _known(node: torch.fx.Node | None) -> torch.fx.Node:
    assert node is not None
    return node


def _attentions(function: Function) -> dict[int, torch.fx.Node]:
    nodes = function.calls(torch.ops.graftwork.attention.default)
    found = {int(str(node.kwargs["layer"])): node for node in nodes}
    if not nodes or len(found) != len(nodes):
        raise GraftworkError(
            f"{function.name}: expected one graftwork.attention a layer, got {len(nodes)} "
            f"for the layers {sorted(found)}"
        )
    return found


def _is_stream(node: torch.fx.Node) -> bool:
    value_type = node.meta.get("type")
    dims = value_type.dims if isinstance(value_type, TensorType) else ()
    return len(dims) == 3 and dims[:2] == (Sym("B"), Sym("T")) and isinstance(dims[2], int)


class _Reach:
    """For every node, the last chain value that it depends on."""

    def __init__(self, function: Function, chain: Sequence[torch.fx.Node]) -> None:
        self.chain = list(chain)
        place = {node: i for i, node in enumerate(chain)}
        self.depends: dict[torch.fx.Node, int] = {}
        for node in function:
            reached = [self.depends[arg] for arg in node.all_input_nodes]
            self.depends[node] = max([place.get(node, -1), *reached])

    def last_before(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The last chain value that the node is computed from."""
        index = self.depends[node]
        return self.chain[index] if index >= 0 else None

    def first_after(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The chain value after that: as it dominates, it depends on the node."""
        index = self.depends[node] + 1
        return self.chain[index] if index < len(self.chain) else None


def _last_addition(chain: list[torch.fx.Node], start: torch.fx.Node | None) -> torch.fx.Node | None:
    """The last chain value from `start` on that adds something computed from the tokens."""
    if start is None:
        return None
    found = start
    for node in chain[chain.index(start) :]:
        summands = [arg for arg in node.args[:2] if isinstance(arg, torch.fx.Node)]
        computed = [arg for arg in summands if arg.op == "call_function"]
        if node.target is _ADD and len(computed) == 2:
            found = node
    return found
