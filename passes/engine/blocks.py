"""A function in blocks that run one after the other: a layer each, found by its markers.

A block ends right before the sum that its marker names, so that a norm fused with that sum belongs
to the block that reads it. What comes after the last marker is a block of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import Function, arguments, cone
from ...ir.rewrite.subgraph import beyond

G = torch.ops.graftwork

STACKS = ("gate_up", "down")
"""The operands of a mixture that hold the weights of all of its experts."""


@dataclass(frozen=True)
class Block:
    """A part of a function.

    name: for people. products: those that were asked for, by the name of the value that they read.
    mixtures: of experts that were asked for, with the names of the values that they read and of the
    experts that each row of these chose. read: a function of what earlier blocks left, and of
    inputs, that gives these values. passed: one that gives what later blocks need; without outputs
    if this is the last.
    """

    name: str
    products: dict[str, tuple[torch.fx.Node, ...]]
    mixtures: dict[torch.fx.Node, tuple[str, str]]
    read: Function
    passed: Function

    @property
    def is_asked_for(self) -> bool:
        """Whether there is something to find out of it."""
        return bool(self.products or self.mixtures)

    @property
    def multiplied(self) -> frozenset[str]:
        """Names of the weights that its products and experts have."""
        plain = {weight_of(node) for nodes in self.products.values() for node in nodes}
        return frozenset(plain.union(*map(expert_weights, self.mixtures)))


def blocks_of(fn: Function, products: Collection[torch.fx.Node]) -> list[Block]:
    """The blocks that lead to products (calls of `aten.linear` and `graftwork.moe`), whose first
    argument is what they read."""
    places = _places(fn)
    last = max(places[node] for node in products)
    needed = {n for n in cone(products) if n.op == "call_function" and places[n] <= last}
    copied = fn.copy()
    copies = dict(zip(fn, copied, strict=True))
    wanted = [[n for n in sorted(products) if places[n] == i] for i in range(last + 1)]
    known = [_named(copies, _live(needed, places, i)) for i in range(last + 1)]
    read = _named(copies, {source for node in products for source in _sources(node)})
    copied.set_outputs({**read, **{name: n for values in known for name, n in values.items()}})
    made = []
    for i, nodes in enumerate(wanted):
        taps: dict[str, tuple[torch.fx.Node, ...]] = {}
        mixtures: dict[torch.fx.Node, tuple[str, str]] = {}
        for node in nodes:
            tap, *chosen = (copies[source].name for source in _sources(node))
            if chosen:
                mixtures[node] = tap, *chosen  # type: ignore[assignment]
            else:
                taps[tap] = (*taps.get(tap, ()), node)
        left = tuple(known[i + 1]) if i < last else ()
        asked = (*taps, *(name for names in mixtures.values() for name in names))
        steps = beyond(copied, known[i], asked), beyond(copied, known[i], left)
        made.append(Block(f"block {i + 1} of {last + 1}", taps, mixtures, *steps))
    return made


def source_of(product: torch.fx.Node) -> torch.fx.Node:
    """The value that a product reads."""
    source = product.args[0]
    assert isinstance(source, torch.fx.Node)
    return source


def _sources(product: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """The value that a product reads; of a mixture also the experts that each row chose."""
    if product.target is not G.moe.default:
        return (source_of(product),)
    given = arguments(product)
    return given["x"], given["experts"]


def expert_weights(mixture: torch.fx.Node) -> tuple[str, ...]:
    """The names of the stacks of weights, and of biases, that a mixture's experts have."""
    given = arguments(mixture)
    parts = (given[name] for name in (*STACKS, *(f"{name}_bias" for name in STACKS)))
    return tuple(str(part.target) for part in parts if part is not None)


def weight_of(product: torch.fx.Node) -> str:
    """The name of the weight that a product multiplies with."""
    source = product.args[1]
    assert isinstance(source, torch.fx.Node)
    return str(source.target)


def _named(
    copies: dict[torch.fx.Node, torch.fx.Node], nodes: set[torch.fx.Node]
) -> dict[str, torch.fx.Node]:
    return {copies[node].name: copies[node] for node in sorted(nodes)}


def _places(fn: Function) -> dict[torch.fx.Node, int]:
    """In which block each call is."""
    markers = [n for n in fn.calls(G.hidden.default) if n.kwargs["point"] == "block"]
    places: dict[torch.fx.Node, int] = {}
    for i, marker in enumerate(markers):
        for node in cone(_sum_of(marker).all_input_nodes):
            places.setdefault(node, i)
    for node in fn:
        # One of several results stands where they are made: together they are no value.
        several = node.op == "call_function" and not hasattr(node.target, "_schema")
        known = places.get(node.all_input_nodes[0] if several else node, len(markers))
        places[node] = known
    return places


def _sum_of(marker: Any) -> torch.fx.Node:
    """The call that makes what a marker names."""
    node: torch.fx.Node = marker.args[0]
    while node.op == "call_function" and not hasattr(node.target, "_schema"):  # a result of several
        node = node.all_input_nodes[0]
    return node


def _live(
    needed: set[torch.fx.Node], places: dict[torch.fx.Node, int], block: int
) -> set[torch.fx.Node]:
    """Values made before a block that are needed in it or after it."""
    return {
        node
        for node in needed
        if places[node] < block
        and any(user in needed and places[user] >= block for user in node.users)
    }
