"""A function folded by layer: layers that do the same are one block, with their numbers.

A node belongs to the layer of its site, or of the weights that it reads. One without (a pass made
it) belongs to the last layer that it depends on, if a layer depends on it; else to what comes
before or after all layers. Two layers are alike if their nodes call the same ops on the same
places, with weights of equal types and equal options (an option that is the layer's number counts
as equal).
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch.fx

from ..ir.api import Function, TensorType, site_of
from ..ir.function import arguments
from ..ir.support.errors import GraftworkError
from ..ir.text.printer import argument_text, target_name

BEFORE, AFTER = -1, 1 << 30
"""Layers of what comes before and after all layers."""
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("reshape", "view", "permute", "transpose.int", "unsqueeze", "squeeze.dim", "expand"),
        *("split_with_sizes", "slice.Tensor", "alias", "select.int", "squeeze.dims"),
    )
)
"""Ops that move no data, or could do without."""
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|blk)\.([0-9]{1,6})\.")
LONGEST = 60
"""Characters of an option that are shown."""
ALIKE = 0.7
"""From which share of equal calls on a block is shown by what differs."""


@dataclass(frozen=True)
class Block:
    """Layers that are alike, or what comes before or after them. layers: their numbers, none for
    the latter. nodes: calls of the first layer, in order. beside: the title of a block that is much
    the same; more: what this one has and that has not, in words; less: the other way round."""

    title: str
    layers: tuple[int, ...]
    nodes: tuple[torch.fx.Node, ...]
    beside: str = ""
    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()

    @property
    def layer(self) -> int:
        """The number that its nodes' names have."""
        return self.layers[0] if self.layers else BEFORE


def name_of(node: torch.fx.Node) -> str:
    """A node's op without its library: ``linear``, ``[1]`` for a result of several."""
    if node.target is operator.getitem:
        return f"[{node.args[1]}]"
    text = target_name(node.target) or str(node.target)
    return text.partition(".")[2] or text


def is_view(node: torch.fx.Node) -> bool:
    """Whether a call only says how values are looked at."""
    return is_wire(node) or target_name(node.target) in VIEWS


def is_wire(node: torch.fx.Node) -> bool:
    """Whether a call only names a value: a result of several, or a mark."""
    return node.target is operator.getitem or target_name(node.target) == "graftwork.hidden"


def types_text(node: torch.fx.Node) -> str:
    """The type of a node's value, or of its results."""
    found = node.meta.get("type")
    if isinstance(found, TensorType):
        return str(found)
    return ", ".join(map(str, found)) if isinstance(found, tuple) else ""


def options_of(node: torch.fx.Node) -> dict[str, str]:
    """Arguments of a call that hold no node and are not the default, as text."""
    if node.target is operator.getitem:
        return {}
    usual = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]
    found = {}
    for name, value in arguments(node).items():
        if value == [] or _holds_nodes(value) or _same(value, usual.get(name)):
            continue
        try:
            text = f"{value:.6g}" if isinstance(value, float) else argument_text(value, {})
        except GraftworkError:
            text = type(value).__name__
        found[name] = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return found


def numbered(numbers: Sequence[int]) -> str:
    """Numbers as ranges.

    >>> numbered([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def without_layer(name: str, layer: int) -> str:
    """A name of a layer's part without the layer's number and all before it.

    >>> without_layer("model.layers.12.mlp.down_proj.weight", 12)
    'mlp.down_proj.weight'
    """
    if layer in (BEFORE, AFTER):
        return name
    return re.sub(rf"^.*?(?:^|\.){layer}(?:\.|$)", "", name, count=1)


def layers_of(function: Function) -> dict[torch.fx.Node, int]:
    """The layer of every call; see the module."""
    calls = function.calls()
    own = {node: _own_layer(node) for node in calls}
    first: dict[torch.fx.Node, int] = {}
    for node in calls:  # what a node depends on
        said = None if is_wire(node) else own[node]
        inner = [first[n] for n in node.all_input_nodes if n in first]
        first[node] = max([BEFORE, *inner]) if said is None or said < 0 else said
    led: set[torch.fx.Node] = set()
    for node in reversed(calls):  # nodes that a layer depends on
        said = own[node]
        layered = said is not None and said >= 0
        if layered or any(user in led for user in node.users):
            led.add(node)
    return {n: first[n] if n in led or (first[n] == BEFORE and led) else AFTER for n in calls}


def _own_layer(node: torch.fx.Node) -> int | None:
    """The layer that a call's site says, or the name of a weight that it reads."""
    said = site_of(node).layer
    if said is not None:
        return said
    names = (str(n.target) for n in node.all_input_nodes if n.op == "get_attr")
    found = {int(match[1]) for match in map(_LAYER.search, names) if match}
    return found.pop() if len(found) == 1 else None


def folded(function: Function) -> list[Block]:
    """The function's blocks, in the order of their first layers."""
    where = layers_of(function)
    groups: dict[int, list[torch.fx.Node]] = defaultdict(list)
    for node, layer in where.items():
        groups[layer].append(node)
    alike: dict[Any, list[int]] = defaultdict(list)
    for layer in sorted(groups):
        layered = layer not in (BEFORE, AFTER)
        alike[_signature(groups[layer], layer, where) if layered else layer].append(layer)
    blocks = [_block(layers, groups, len(alike) == 1) for layers in alike.values()]
    return _compared(blocks, where)


def _block(layers: list[int], groups: Mapping[int, list[torch.fx.Node]], only: bool) -> Block:
    first = layers[0]
    if first in (BEFORE, AFTER):
        title = "all" if only else "before the layers" if first == BEFORE else "after the layers"
        return Block(title, (), tuple(groups[first]))
    many = len(layers) > 1
    title = f"layers {numbered(layers)} ({len(layers)} alike)" if many else f"layer {first}"
    return Block(title, tuple(layers), tuple(groups[first]))


def _compared(blocks: list[Block], where: Mapping[torch.fx.Node, int]) -> list[Block]:
    """Blocks of layers beside those that stand for more layers and are much the same."""
    words = {
        block.title: [
            f"{label(n, block.layer)}{_shared_text(n, where)}"
            for n in block.nodes
            if not is_wire(n)
        ]
        for block in blocks
    }
    made = {block.title: block for block in blocks}
    whole: list[Block] = []
    for block in sorted((b for b in blocks if b.layers), key=lambda b: -len(b.layers)):
        here, best = words[block.title], ALIKE
        for other in whole:
            there = words[other.title]
            match = SequenceMatcher(None, there, here, autojunk=False)
            if match.ratio() <= best:
                continue
            best = match.ratio()
            edits = [edit for edit in match.get_opcodes() if edit[0] != "equal"]
            less = tuple(text for _, a, b, _, _ in edits for text in there[a:b])
            more = tuple(text for *_, a, b in edits for text in here[a:b])
            made[block.title] = replace(block, beside=other.title, more=more, less=less)
        if not made[block.title].beside:
            whole.append(block)
    return list(made.values())


def label(node: torch.fx.Node, layer: int) -> str:
    """What a call is, in words that layers share: op, part, weights with types, states, options,
    type."""
    texts = [f"{key}={_plain(key, text, layer)}" for key, text in options_of(node).items()]
    words = [name_of(node), *reads_of(node, layer), *texts, types_text(node)]
    part = without_layer(site_of(node).module, layer)
    return " ".join([*words, *([f"({part})"] if part else [])])


def reads_of(node: torch.fx.Node, layer: int) -> list[str]:
    """Weights, states and inputs that a call reads, with types."""
    given = [n for n in node.all_input_nodes if n.op in ("get_attr", "placeholder")]
    return [f"{_short(without_layer(str(n.target), layer))} {types_text(n)}" for n in given]


def shared(node: torch.fx.Node, where: Mapping[torch.fx.Node, int]) -> bool:
    """Whether a value comes before the layers, and more than one of them reads it."""
    users = {where[user] for user in node.users if user in where} - {BEFORE}
    return where.get(node) == BEFORE and len(users) > 1


def _shared_text(node: torch.fx.Node, where: Mapping[torch.fx.Node, int]) -> str:
    if where[node] == BEFORE:
        return ""
    return "".join(f" of %{n.name}" for n in node.all_input_nodes if shared(n, where))


def _signature(
    nodes: Sequence[torch.fx.Node], layer: int, where: Mapping[torch.fx.Node, int]
) -> tuple[Any, ...]:
    calls = [node for node in nodes if not is_wire(node)]
    places = {node: i for i, node in enumerate(calls)}

    def read(node: torch.fx.Node) -> str:
        index = ""
        while node.op == "call_function" and is_wire(node):
            if shared(node, where):
                return node.name
            index += name_of(node) if node.target is operator.getitem else ""
            node = node.all_input_nodes[0]
        if node in places:
            return f"#{places[node]}{index}"
        if node.op != "call_function":
            return f"{without_layer(str(node.target), layer)}:{types_text(node)}"
        return node.name if shared(node, where) else f"earlier:{types_text(node)}"

    return tuple((label(n, layer), *map(read, n.all_input_nodes)) for n in calls)


def _short(name: str) -> str:
    return name.removesuffix(".weight")


def _plain(key: str, text: str, layer: int) -> str:
    return "layer" if key == "layer" and text == str(layer) else text


def _same(value: Any, usual: Any) -> bool:
    return value is usual or (type(value) is type(usual) and bool(value == usual))


def _holds_nodes(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_nodes, value))
    return isinstance(value, torch.fx.Node)
