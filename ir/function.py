"""A function: a `torch.fx.Graph` with a type and a site on every node.

Nodes are placeholders (inputs and states), ``get_attr`` (weights, by name), calls of graftwork ops
or core ATen ops, ``operator.getitem`` on ops with several results, and one output, whose argument
is a dict from output name to node. An updated state is an output of the state's name. Symbolic
sizes in arguments are `Sym`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch.fx

from .inference.infer import infer, inferred
from .inference.signature import placed
from .support.errors import GraftworkError
from .support.names import check_name
from .types import TensorType, ValueType
from .weights import Weight


@dataclass(frozen=True)
class Site:
    """Origin of a node: module path in the source model, layer index, source line."""

    module: str = ""
    layer: int | None = None
    line: str = ""

    def __bool__(self) -> bool:
        return bool(self.module or self.line) or self.layer is not None


NOWHERE = Site()


def type_of(node: torch.fx.Node) -> TensorType:
    """The tensor type of a node's value. Errors: `GraftworkError` for ops with several results."""
    value = node.meta["type"]
    if not isinstance(value, TensorType):
        raise GraftworkError(f"%{node.name} has several results; take one with [i] first")
    return value


def site_of(node: torch.fx.Node) -> Site:
    """The site of a node (empty if unknown)."""
    site = node.meta.get("site", NOWHERE)
    return site if isinstance(site, Site) else NOWHERE


class Role(Enum):
    """Use of a function's results. target: the model's results. draft: results that are verified;
    runs on fewer cores. upkeep: moves rows of states."""

    TARGET = "target"
    DRAFT = "draft"
    UPKEEP = "upkeep"


def cone(
    roots: Iterable[torch.fx.Node], known: Container[torch.fx.Node] = ()
) -> set[torch.fx.Node]:
    """The roots and their ancestors. known: nodes whose ancestors are not followed."""
    seen: set[torch.fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += () if node in known else node.all_input_nodes
    return seen


def arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Arguments of an op's call by name, in the schema's order, with defaults."""
    defaults = _defaults(node.target)
    bound = dict(defaults)
    bound.update(zip((name for name, _ in defaults), node.args, strict=False))
    bound.update(node.kwargs)
    return bound


@lru_cache(maxsize=4096)
def _defaults(target: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in target._schema.arguments)


class Function:
    """A named, typed graph. Passes edit a copy."""

    def __init__(
        self, name: str, graph: torch.fx.Graph | None = None, role: Role = Role.TARGET
    ) -> None:
        check_name("a function", name)
        self.name, self.role = name, role
        self.graph = graph or torch.fx.Graph()

    # -- reading

    def __iter__(self) -> Iterator[torch.fx.Node]:
        return iter(list(self.graph.nodes))

    @property
    def inputs(self) -> tuple[torch.fx.Node, ...]:
        """Placeholders in order: arguments and states."""
        return tuple(self.graph.find_nodes(op="placeholder"))

    def input(self, name: str) -> torch.fx.Node:
        """The placeholder called `name`. Errors: `GraftworkError` listing the inputs."""
        for node in self.inputs:
            if node.target == name:
                return node
        known = ", ".join(str(n.target) for n in self.inputs)
        raise GraftworkError(f"{self.name} has no input {name!r}; it has {known}")

    def has_input(self, name: str) -> bool:
        """Whether the function has an input or state called `name`."""
        return any(node.target == name for node in self.inputs)

    @property
    def output_node(self) -> torch.fx.Node:
        """The output node. Errors: `GraftworkError` if there is none."""
        node: torch.fx.Node
        for node in self.graph.find_nodes(op="output"):
            return node
        raise GraftworkError(f"{self.name} has no output")

    @property
    def outputs(self) -> dict[str, torch.fx.Node]:
        """Output (and updated state) nodes by name."""
        return dict(self.output_node.args[0])  # type: ignore[arg-type]

    @property
    def weights(self) -> set[str]:
        """Names of the weights that the function uses."""
        return {str(n.target) for n in self.graph.find_nodes(op="get_attr")}

    def calls(self, *targets: Any) -> list[torch.fx.Node]:
        """Nodes that call one of the targets, in order (all calls if none is given)."""
        nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        return [n for n in nodes if not targets or n.target in targets]

    # -- building

    def copy(self) -> Function:
        """An independent copy: nodes, types and sites."""
        graph = torch.fx.Graph()
        mapping: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in self.graph.nodes:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        return Function(self.name, graph, self.role)

    def add_input(self, name: str, type: TensorType) -> torch.fx.Node:
        """A new placeholder after the existing ones. Errors: `InputError` for an invalid name."""
        check_name(f"{self.name}: an input", name)
        last = self.inputs[-1] if self.inputs else None
        anchor = last if last is not None else self.graph._root
        with self.graph.inserting_after(anchor):
            node = self.graph.placeholder(_identifier(name))
        node.target = name
        node.meta = {"type": type, "site": NOWHERE}
        return node

    def taking(self, name: str, type: TensorType) -> torch.fx.Node:
        """The placeholder called `name`; a new one of this type if there is none."""
        return self.input(name) if self.has_input(name) else self.add_input(name, type)

    def weight(self, weight: Weight) -> torch.fx.Node:
        """A reference to a weight, at the insertion point."""
        node = self.graph.create_node("get_attr", weight.name, name=_identifier(weight.name))
        node.meta = {"type": weight.type, "site": NOWHERE}
        return node

    def call(
        self,
        target: Callable[..., Any],
        *args: Any,
        site: Site = NOWHERE,
        name: str | None = None,
        granted: bool = False,
        **kwargs: Any,
    ) -> torch.fx.Node:
        """A typed call at the insertion point. What is given by name as None is absent where None
        is the default. granted: see `infer`; kept by the node. Errors: `VerifyError` if the types
        do not fit."""
        if kwargs:
            absent = [name for name, default in _defaults(target) if default is None]
            kwargs = {n: v for n, v in kwargs.items() if v is not None or n not in absent}
        node_type = infer(target, args, kwargs, granted=granted)
        name = name or _short_name(target)
        args, kwargs = placed(target, args, kwargs)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta = {"type": node_type, "site": site}
        if granted:
            node.meta["granted"] = True
        return node

    def item(self, node: torch.fx.Node, index: int) -> torch.fx.Node:
        """Result `index` of an op with several results."""
        return self.call(operator.getitem, node, index, site=site_of(node))

    def set_outputs(self, outputs: Mapping[str, torch.fx.Node]) -> None:
        """Set the function's outputs, in this order. Errors: `InputError` for an invalid name."""
        for name in outputs:
            check_name(f"{self.name}: an output", name)
        for node in self.graph.find_nodes(op="output"):
            self.graph.erase_node(node)
        node = self.graph.output(dict(outputs))
        node.meta = {"type": (), "site": NOWHERE}

    def replace(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        """Give the users of a node another one, and take the node away."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def retype(self) -> list[tuple[torch.fx.Node, ValueType, ValueType]]:
        """Infer every call's type again, in place; returns changes (node, before, after)."""
        changed = []
        for node in self.calls():
            before = node.meta["type"]
            after = inferred(node)
            if before != after:
                node.meta["type"] = after
                changed.append((node, before, after))
        return changed


def _short_name(target: Any) -> str | None:
    """``linear`` for ``aten.linear.default``; the graph makes it unique."""
    schema = getattr(target, "_schema", None)
    return None if schema is None else str(schema.name).partition("::")[2].lstrip("_")


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
