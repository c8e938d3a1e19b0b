"""Subgraphs: dependencies, extraction, evaluation and inlining."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..execution.interpret import run
from ..function import Function, cone, site_of, type_of
from ..program import ModelInfo, Program
from ..types import Sym
from ..weights import Weight, WeightStore


def constants(fn: Function) -> set[torch.fx.Node]:
    """Weights, and nodes computed from weights and numbers alone."""
    return _classify(fn, ())[0]


def decided_by(fn: Function, inputs: Collection[str]) -> set[torch.fx.Node]:
    """Nodes computed from these inputs, weights and numbers only, the inputs included; not those
    that depend on no input."""
    return _classify(fn, inputs)[1]


def tables_of(fn: Function) -> set[str]:
    """Weights that are combined with positions only, such as tables of angles."""
    places = decided_by(fn, ("positions",))
    return {
        str(node.target)
        for node in fn
        if node.op == "get_attr" and node.users and places.issuperset(node.users)
    }


def _classify(
    fn: Function, inputs: Collection[str]
) -> tuple[set[torch.fx.Node], set[torch.fx.Node]]:
    constant: set[torch.fx.Node] = set()
    decided: set[torch.fx.Node] = set()
    for node in fn:
        if node.op == "placeholder":
            if node.target in inputs:
                decided.add(node)
        elif node.op != "output":
            args = set(node.all_input_nodes)
            if args <= constant:
                constant.add(node)
            elif all(arg in constant or arg in decided for arg in args):
                decided.add(node)
    return constant, decided


def extract(fn: Function, outputs: Mapping[str, torch.fx.Node]) -> Function:
    """A new function that computes `outputs`, with the inputs that they need."""
    members = sorted(cone(outputs.values()))  # fx nodes compare by their place in the graph
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in members:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    piece = Function("piece", graph)
    piece.set_outputs({name: copies[node] for name, node in outputs.items()})
    return piece


def beyond(fn: Function, values: Mapping[str, torch.fx.Node], wanted: Sequence[str]) -> Function:
    """The rest of a function: computes the `wanted` outputs from some values. values: nodes, by the
    names of inputs that replace them. Other inputs that are still needed stay inputs."""
    given = {node: name for name, node in values.items()}
    outputs = {name: fn.outputs[name] for name in wanted}
    needed = cone(outputs.values(), given)
    rest = Function(f"{fn.name}.beyond", role=fn.role)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in fn.inputs:
        if node in needed and node not in given:
            copies[node] = rest.graph.node_copy(node)
    for node, name in given.items():
        if node in needed:
            copies[node] = rest.add_input(name, type_of(node))
    for node in fn:
        if node in needed and node not in copies:
            copies[node] = rest.graph.node_copy(node, lambda n: copies[n])
    rest.set_outputs({name: copies[node] for name, node in outputs.items()})
    return rest


def evaluate(
    piece: Function, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run an extracted function with the reference interpreter."""
    store = WeightStore({name: Weight.of(name, tensor) for name, tensor in weights.items()})
    info = ModelInfo("piece", vocab_size=0, context=0)
    return run(Program("piece", {piece.name: piece}, store, info), piece.name, inputs)


def fresh_name(taken: Collection[str], wanted: str) -> str:
    """`wanted`, or `wanted.1`, `wanted.2`, ... if it is taken."""
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}.{count}"
    return name


def inlined(
    fn: Function,
    body: Function,
    given: Mapping[torch.fx.Node, torch.fx.Node | None],
    sizes: Mapping[str, int],
) -> dict[str, torch.fx.Node]:
    """Insert another function's body at the insertion point of `fn`; returns its outputs. given:
    nodes by the body's inputs. sizes: values of symbols. Errors: `VerifyError` if types do not
    fit."""
    values: dict[Any, Any] = dict(given)

    def value(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return values[arg]
        return arg.bind(sizes) if isinstance(arg, Sym) else arg

    for node in body:
        if node.op == "get_attr":
            values[node] = fn.graph.node_copy(node)
        elif node.op == "call_function":
            target: Any = node.target
            args, kwargs = map_aggregate(node.args, value), map_aggregate(node.kwargs, value)
            values[node] = fn.call(target, *args, site=site_of(node), **kwargs)  # type: ignore[arg-type]
    return {name: values[node] for name, node in body.outputs.items()}
