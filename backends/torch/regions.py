"""Repeated parts of a module, its layers, become calls of one piece that is compiled once.

torch.compile would translate every layer anew, and that is most of the time it takes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.fx
from torch.fx.node import map_arg

Node = torch.fx.Node
Copies = list[list[Node]]


LEAST = 12
"""Operations of a part that is worth a piece of its own; smaller ones gain more by fusing with
others."""


SIZE = torch.ops.aten.sym_size.int


def cut_repeats(module: torch.fx.GraphModule, least: int = LEAST) -> None:
    """Make its longest row of equal parts calls of one submodule, and what is before and after
    them calls of others, which are cut likewise.

    Parts are equal if they do the same operations with the same constants on their own results
    and on corresponding values from outside. Tensors alone cross the borders: each part reads
    their sizes for itself. A module in which nothing repeats stays as it is.
    """
    _read_sizes_where_used(module.graph)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    faces = list(_pieces(calls, least))
    if any(len(face.copies) > 1 for face in faces):
        new: dict[Node, Node] = {}
        for face, part in [(face, _part(face)) for face in faces]:
            _call_piece(module, face, part, new)
        module.graph.lint()
        module.recompile()


def _pieces(calls: Sequence[Node], least: int) -> Iterator[_Interface]:
    """The parts into which calls are cut, in order."""
    for start, end, length in _rows(calls, least):
        face = _best_cut(calls, start, end, length)
        if face is None:
            continue
        at = calls.index(face.copies[0][0])
        rest = calls[:at], calls[at + len(face.copies) * length :]
        if all(not part or _interface([list(part)]) is not None for part in rest):
            yield from _pieces(rest[0], least)
            yield face
            yield from _pieces(rest[1], least)
            return
    whole = _interface([list(calls)]) if calls else None
    if whole is not None:
        yield whole


def _read_sizes_where_used(graph: torch.fx.Graph) -> None:
    """Every reader of a size gets a call of its own that reads it."""
    for size in graph.find_nodes(op="call_function", target=SIZE):
        for user in list(size.users):
            with graph.inserting_before(user):
                own = graph.call_function(SIZE, size.args)
            user.replace_input_with(size, own)
        graph.erase_node(size)


@dataclass(frozen=True)
class _Interface:
    """Copies of a part, and what they take and give."""

    copies: Copies
    arguments: list[tuple[Node, ...]]
    """Values from outside: for each, the node that each copy reads."""
    results: list[int]
    """Places in a copy of the nodes that are read outside it."""

    @property
    def size(self) -> int:
        """How much crosses its border: of alignments of the same copies, the least is best."""
        return len(self.arguments) + len(self.results)


def _rows(calls: Sequence[Node], least: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, length): calls[start:end] repeat after `length` of at least `least`.

    What saves most comes first.
    """
    numbers: dict[str, int] = {}
    kinds = np.array([numbers.setdefault(_kind(node), len(numbers)) for node in calls])
    found: list[tuple[int, int, int, int]] = []
    for length in range(least, len(kinds) // 2 + 1):
        same = np.concatenate([[0], kinds[:-length] == kinds[length:], [0]])
        edges = np.flatnonzero(np.diff(same))
        for start, stop in edges.reshape(-1, 2).tolist():
            copies = (stop - start) // length + 1
            if copies > 1:
                found.append((-(copies - 1) * length, length, start, stop + length))
    for _, length, start, end in sorted(found):
        yield start, end, length


def _kind(node: Node) -> str:
    """The operation and all of its arguments, of values what is known of their types, by symbol: a
    piece is compiled for one set of them."""
    said = map_arg((node.args, node.kwargs), lambda value: str(value.meta.get("type", "%")))
    return repr((id(node.target), said))


def _best_cut(calls: Sequence[Node], start: int, end: int, length: int) -> _Interface | None:
    """The copies whose borders the fewest values cross; None if they read unlike values."""
    found: list[_Interface] = []
    for shift in range(start, min(start + length, end - 2 * length + 1)):
        count = (end - shift) // length
        copies = [list(calls[shift + i * length :][:length]) for i in range(count)]
        face = _interface(copies)
        if face is not None:
            found.append(face)
    return min(found, key=lambda face: (-len(face.copies), face.size), default=None)


def _interface(copies: Copies) -> _Interface | None:
    places = [{node: place for place, node in enumerate(copy)} for copy in copies]
    arguments: dict[tuple[Node, ...], None] = {}
    for twins in zip(*copies, strict=True):
        for values in zip(*map(_values, twins), strict=True):
            inside = {own.get(value) for own, value in zip(places, values, strict=True)}
            if len(inside) > 1:
                return None
            if inside == {None}:
                arguments[values] = None
    # A copy that reads one value where another reads two: what is compiled takes it for another.
    if any(len(set(own)) < len(own) for own in zip(*arguments, strict=True)):
        return None
    results = [
        place
        for place, twins in enumerate(zip(*copies, strict=True))
        if any(
            user not in own for own, node in zip(places, twins, strict=True) for user in node.users
        )
    ]
    if not all(_is_tensor(node) for copy in copies for node in map(copy.__getitem__, results)):
        return None
    return _Interface(copies, list(arguments), results)


def _is_tensor(node: Node) -> bool:
    """Not a tuple, nor a size or what is computed of sizes."""
    return not _is_number(node) and any(u.target is not operator.getitem for u in node.users)


def _is_number(node: Node) -> bool:
    own = node.all_input_nodes
    computed = getattr(node.target, "__module__", "") == "_operator" and bool(own)
    return node.target is SIZE or (computed and all(map(_is_number, own)))


def _values(node: Node) -> list[Node]:
    """The values among a node's arguments, in order, repeated where they are."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _call_piece(
    module: torch.fx.GraphModule,
    face: _Interface,
    part: torch.fx.GraphModule,
    new: dict[Node, Node],
) -> None:
    """new: what stands for the nodes that are in pieces already; grows by those of this one."""
    name, graph = f"piece_{len(list(module.children()))}", module.graph
    module.add_submodule(name, part)
    for index, copy in enumerate(face.copies):
        taken = [values[index] for values in face.arguments]
        with graph.inserting_after(copy[-1]):
            call = graph.call_module(name, tuple(new.get(value, value) for value in taken))
        for number, place in reversed(list(enumerate(face.results))):
            with graph.inserting_after(call):
                new[copy[place]] = graph.call_function(operator.getitem, (call, number))
            copy[place].replace_all_uses_with(new[copy[place]])
        for node in reversed(copy):
            graph.erase_node(node)


def _part(face: _Interface) -> torch.fx.GraphModule:
    """The copies' common operations as a module of its own."""
    graph = torch.fx.Graph()
    given = {values: graph.placeholder(f"value_{i}") for i, values in enumerate(face.arguments)}
    made: dict[Node, Node] = {}
    for twins in zip(*face.copies, strict=True):
        slots = zip(*map(_values, twins), strict=True)

        def new(_: Node, slots: Iterator[tuple[Node, ...]] = slots) -> Node:
            values = next(slots)
            return made[values[0]] if values[0] in made else given[values]

        args, kwargs = map_arg((twins[0].args, twins[0].kwargs), new)
        made[twins[0]] = graph.call_function(twins[0].target, args, kwargs)
    graph.output(tuple(made[face.copies[0][place]] for place in face.results))
    return torch.fx.GraphModule({}, graph)
