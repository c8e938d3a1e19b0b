"""The layers of a trace that stand for others like them, see `layers`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from ..ir import Site
from .aten import LOWERINGS, Call
from .layers import MARK, NotAlike
from .sites import layer_of, strip_root


def _same(call: Call) -> Any:
    """Marks change nothing."""
    return call.args[0]


LOWERINGS[MARK] = _same


def is_copy(node: torch.fx.Node) -> bool:
    """Whether a call of a trace stands for a layer that was not traced."""
    return node.target is MARK and node.args[1] == "like"


@dataclass(frozen=True)
class Copy:
    """A layer that was traced, for one that was not. begin, end: its marks. between: the nodes
    between them that are needed. own: its parameters and buffers, and the other layer's. path, new:
    the paths of both."""

    begin: torch.fx.Node
    end: torch.fx.Node
    between: list[torch.fx.Node]
    own: dict[torch.fx.Node, torch.fx.Node]
    path: str
    new: str

    def site(self, site: Site) -> Site:
        """Where the same node of the other layer is."""
        if site.module != self.path and not site.module.startswith(f"{self.path}."):
            return site
        module = self.new + site.module.removeprefix(self.path)
        return replace(site, module=module, layer=layer_of(module))


class Copies:
    """The layers of a trace between marks. live: nodes that its results need.

    Errors: `NotAlike` if the second and third layer of a kind differ, or marks are not where they
    can be found.
    """

    def __init__(self, exported: ExportedProgram, root: str, live: set[torch.fx.Node]) -> None:
        self.exported, self.root = exported, root
        self.layers: dict[tuple[str, int], list[torch.fx.Node]] = {}
        self.marks: dict[tuple[str, int], list[torch.fx.Node]] = {}
        open_: tuple[str, int] | None = None
        for node in exported.graph.nodes:
            if node.target is MARK and node.args[1] != "like":
                place = (str(node.args[2]), int(node.args[3]))
                self.marks.setdefault(place, []).append(node)
                open_ = place if node.args[1] == "begin" else None
            elif open_ is not None and node.op == "call_function" and node in live:
                self.layers.setdefault(open_, []).append(node)
        signature = exported.graph_signature
        named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        nodes = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
        self.held = {strip_root(path, root): nodes[name] for name, path in named.items()}
        constants = {**signature.inputs_to_lifted_tensor_constants}
        self.constants = {nodes[n]: exported.constants[target] for n, target in constants.items()}
        self.alike: dict[tuple[str, int], bool] = {}

    def of(self, node: torch.fx.Node) -> Copy:
        """What stands in the place of a layer."""
        _, _, stack, layer, like = node.args
        stack, layer, like = str(stack), int(layer), int(like)  # type: ignore[arg-type]
        place = (stack, like)
        if place not in self.alike:
            self.alike[place] = self._as_the_next(stack, like)
        if not self.alike[place]:
            raise NotAlike(f"{stack}.{like} differs from the next layer of its kind")
        begin, end = self.marks[place]
        own = self._own(stack, like, layer)
        return Copy(
            begin, end, self.layers.get(place, []), own, f"{stack}.{like}", f"{stack}.{layer}"
        )

    def _own(self, stack: str, one: int, other: int) -> dict[torch.fx.Node, torch.fx.Node]:
        prefix = f"{stack}.{one}."
        names = [name for name in self.held if name.startswith(prefix)]
        try:
            return {
                self.held[n]: self.held[f"{stack}.{other}.{n.removeprefix(prefix)}"] for n in names
            }
        except KeyError as error:
            raise NotAlike(f"{stack}.{other} has no {error}") from error

    def _as_the_next(self, stack: str, like: int) -> bool:
        """Whether the layer is as the next that was traced is: the third of the kind."""
        later = [n for s, n in self.layers if s == stack and n > like]
        return any(self._equal(stack, like, number) for number in later)

    def _equal(self, stack: str, one: int, other: int) -> bool:
        places = (stack, one), (stack, other)
        if any(len(self.marks.get(place, ())) != 2 for place in places):
            return False
        nodes = [self.layers.get(place, []) for place in places]
        if len(nodes[0]) != len(nodes[1]):
            return False
        partner: dict[Any, Any] = dict(zip(*nodes, strict=True))
        partner |= self._own(stack, one, other)
        partner[self.marks[places[0]][0]] = self.marks[places[1]][0]
        partner[self.marks[places[0]][1]] = self.marks[places[1]][1]

        def renamed(arg: Any) -> Any:
            return map_arg(arg, lambda node: partner.get(node, node))

        pairs = [*zip(*nodes, strict=True), tuple(self.marks[place][1] for place in places)]
        for mine, theirs in pairs:
            if mine.target is not theirs.target:
                return False
            if mine.target is MARK:
                if not self._same(renamed(mine.args[0]), theirs.args[0]):
                    return False
            elif not self._same(
                (renamed(mine.args), renamed(mine.kwargs)), (theirs.args, theirs.kwargs)
            ):
                return False
        return True

    def _same(self, one: Any, other: Any) -> bool:
        if isinstance(one, torch.fx.Node) and isinstance(other, torch.fx.Node):
            if one in self.constants and other in self.constants:
                return torch.equal(self.constants[one], self.constants[other])
            return one is other
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            return len(one) == len(other) and all(map(self._same, one, other))
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(self._same(one[k], other[k]) for k in one)
        return type(one) is type(other) and str(one) == str(other)
