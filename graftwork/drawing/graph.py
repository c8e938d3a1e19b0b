"""What of a block is drawn: boxes with lines of text, and edges with types.

Results of several (``[1]``) and marks are part of an edge; calls that only look at values
otherwise are one small box a chain. Weights, states, inputs and what all layers share (masks,
tables of positions) are lines in the boxes that read them, so that edges are the way of the text.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.fx

from ..ir.function import site_of
from ..ir.ops import OpDef, all_ops
from ..ir.text.printer import target_name
from .fold import (
    Block,
    is_view,
    is_wire,
    name_of,
    options_of,
    reads_of,
    shared,
    types_text,
    without_layer,
)

_KINDS = {
    "attention": ("attention", "causal_conv", "grouped_attention", "recurrent", "source", "sparse"),
    "norm": ("norm",),
    "cache": ("dropped", "eviction", "grouped_cache", "parallel", "placed_rows", "quantized_cache"),
    "product": ("mlp", "moe", "quantized", "quantized_moe"),
}
_KIND_OF_FILE = {file: kind for kind, files in _KINDS.items() for file in files}
_KIND_OF_ATEN = {"aten.linear": "product", "aten.embedding": "product", "aten.mm": "product"}
_KIND_OF_OP = {"cache_write": "cache", "step_mask": "other"}


@dataclass
class Box:
    """A box. kind: its colour. title and lines: its text. whole: all of it, for a pointer."""

    kind: str
    title: str
    lines: list[str] = field(default_factory=list)
    whole: str = ""


@dataclass(frozen=True)
class Drawn:
    """Boxes by key, in topological order, and edges: ends, and the type of what passes."""

    boxes: Mapping[str, Box]
    edges: list[tuple[str, str, str]]


def kind_of(node: torch.fx.Node) -> str:
    """Which colour a call has: product, attention, norm, cache, view or other."""
    if is_view(node):
        return "view"
    name = target_name(node.target)
    found = all_ops().get(name.removeprefix("graftwork."))
    if found is None or not name.startswith("graftwork."):
        return _KIND_OF_ATEN.get(name, "other")
    return _KIND_OF_OP.get(found.name) or _kind_of(found)


def _kind_of(op: OpDef) -> str:
    file = op.meaning.__module__.rpartition(".")[2]
    return "product" if op.product is not None else _KIND_OF_FILE.get(file, "other")


def drawn(
    block: Block, where: Mapping[torch.fx.Node, int], returned: Mapping[torch.fx.Node, list[str]]
) -> Drawn:
    """A block's picture. where: layers of all calls. returned: names that the function returns
    values under."""
    maker = _Maker(block, where)
    for node in block.nodes:
        maker.add(node)
    for node in block.nodes:
        if names := returned.get(node):
            maker.returns(node, names)
        elif any(user not in maker.inside for user in node.users):
            maker.leaves(node)
    return Drawn(maker.boxes, list(dict.fromkeys(maker.edges)))


class _Maker:
    def __init__(self, block: Block, where: Mapping[torch.fx.Node, int]) -> None:
        self.layer, self.where = block.layer, where
        self.inside = set(block.nodes)
        self.boxes: dict[str, Box] = {}
        self.edges: list[tuple[str, str, str]] = []
        self.key_of: dict[torch.fx.Node, str] = {}

    def add(self, node: torch.fx.Node) -> None:
        """Draw a call, or make it part of the edge or the chain that it continues."""
        given = [n for n in node.all_input_nodes if n.op == "call_function"]
        if is_wire(node) and given:
            self.key_of[node] = self.source(given[0])
            return
        if is_view(node) and len(given) == 1 and self.continues(given[0]):
            key = self.key_of[node] = self.key_of[given[0]]
            self.boxes[key].title += f" · {name_of(node)}"
            self.boxes[key].whole += f"\n{node.name}: {types_text(node)}"
            return
        known = [n for n in given if n not in self.inside and shared(n, self.where)]
        box = self.box(node, known)
        for n in given:
            if n not in known:
                self.edges.append((self.source(n), node.name, passing(n)))
        self.boxes[node.name] = box
        self.key_of[node] = node.name

    def continues(self, view: torch.fx.Node) -> bool:
        """Whether a chain of views goes on in the one call that reads it."""
        key = self.key_of.get(view)
        chain = key is not None and self.boxes[key].kind == "view"
        return chain and len(view.users) == 1 and not is_wire(view)

    def source(self, node: torch.fx.Node) -> str:
        """The box where an edge begins; one for what comes from outside is made."""
        if node in self.key_of:
            return self.key_of[node]
        key = f"from {node.name}"
        if key not in self.boxes:
            # Sources come first.
            port = Box("port", "from before", [], f"{node.name}: {types_text(node)}")
            self.boxes = {key: port, **self.boxes}
        self.key_of[node] = key
        return key

    def box(self, node: torch.fx.Node, known: list[torch.fx.Node]) -> Box:
        reads = reads_of(node, self.layer)
        shown = [*reads, *(f"{n.name} {types_text(n)}" for n in known)]
        options = [f"{key}={text}" for key, text in options_of(node).items()]
        part = without_layer(site_of(node).module, self.layer)
        whole = [f"%{node.name} = {target_name(node.target)}: {types_text(node)}", part, *shown]
        if is_view(node):
            return Box("view", name_of(node), [], "\n".join([*whole, *options]))
        weights = any(n.op == "get_attr" for n in node.all_input_nodes)
        lines = [*([part] if part and not weights else []), *shown]
        lines += [" ".join(options)] if options else []
        lines += [f"as {node.name} {types_text(node)}"] if shared(node, self.where) else []
        site = site_of(node).line
        whole += [*options, *([f"at {site}"] if site else [])]
        return Box(kind_of(node), name_of(node), lines, "\n".join(filter(None, whole)))

    def returns(self, node: torch.fx.Node, names: list[str]) -> None:
        """Say in a small box that the function returns a value; in the call's own for a state."""
        key = self.source(node)
        short = ", ".join(without_layer(name, self.layer) for name in names)
        if self.boxes[key].kind == "cache":
            return
        self.boxes[f"return {node.name}"] = Box("port", f"returns {short}", [], types_text(node))
        self.edges.append((key, f"return {node.name}", passing(node)))

    def leaves(self, node: torch.fx.Node) -> None:
        """Say that later layers read a value. What all of them read is named there."""
        if shared(node, self.where) or all(is_wire(u) and u in self.inside for u in node.users):
            return
        key, what = self.source(node), passing(node)
        if f"to {key} {what}" not in self.boxes:
            self.boxes[f"to {key} {what}"] = Box("port", "goes on", [], types_text(node))
            self.edges.append((key, f"to {key} {what}", what))


def passing(node: torch.fx.Node) -> str:
    """What an edge passes on: a type, and of several results which."""
    while is_wire(node) and node.target is not operator.getitem:
        node = node.all_input_nodes[0]
    index = f"[{node.args[1]}] " if node.target is operator.getitem else ""
    return f"{index}{types_text(node)}"


def outputs_of(function_outputs: Mapping[str, torch.fx.Node]) -> dict[torch.fx.Node, list[str]]:
    """The names that each value is returned under."""
    found: dict[torch.fx.Node, list[str]] = defaultdict(list)
    for name, node in function_outputs.items():
        found[node].append(name)
    return found
