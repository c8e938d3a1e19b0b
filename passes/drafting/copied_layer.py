"""Copies of parts of the target, for drafters that start as them: its layers, its final norm.

Whatever lies between two block markers is copied, so that the layer is of the target's own
kind: with its norms, biases and experts. The weights are new ones that start as the target's; what
depends on positions alone (the angles of rotations) is shared. `insert_kv_cache` gives the
attention a cache of its own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.fx

from ...ir import PassError, cone, derive
from .decoder_layer import next_layer
from .grafts import Graft

G = torch.ops.graftwork


def copied_layer(
    graft: Graft, x: torch.fx.Node, positions: torch.fx.Node, name: str, which: int = -1
) -> torch.fx.Node:
    """x [B,T,H] after a layer; name: prefix of its weights. which: its place among the layers, the
    last one's if none is said.

    Errors: `PassError` for a step whose markers do not tell where the layer begins, and for a layer
    that takes more than states and positions.
    """
    pairs = layers_of(graft)
    if not -len(pairs) <= which < len(pairs):
        raise PassError(
            f"{graft.owner}: step has no graftwork.hidden markers before and after its "
            f"{'last layer' if which == -1 else f'layer {which}'}"
        )
    start, end = pairs[which]
    had = set(graft.fn)
    y = _copied(graft, {start: x, graft.step.input("positions"): positions}, start, end, name)
    number = next_layer(graft)
    for node in graft.fn.calls(G.attention.default):
        if node not in had:
            node.update_kwarg("layer", number)
    return graft.unmarked(y)


def layers_of(graft: Graft) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """The markers before and after each of the step's layers, in order."""
    ends = [n for n in graft.markers if n.kwargs["point"] in ("embedding", "block")]
    pairs = [(start, end) for start, end in pairwise(ends) if end.kwargs["point"] == "block"]
    return pairs if ends and ends[-1].kwargs["point"] == "block" else []


def copied_norm(graft: Graft, x: torch.fx.Node, name: str) -> torch.fx.Node:
    """x [B,T,H] after a norm of its own, which starts as the target's final one; name: prefix of
    its weights. What lies between the target's last layer and its head is such a norm."""
    start, end = graft.markers[-1], graft.product
    return _copied(graft, {start: x}, start, end, name)


def _copied(
    graft: Graft,
    given: dict[Any, torch.fx.Node],
    start: torch.fx.Node,
    end: torch.fx.Node,
    name: str,
) -> torch.fx.Node:
    """What `end` reads, with weights of its own for those between the two."""
    for node in _between(start, end):
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in given:
                given[source] = _own(graft, str(source.target), name)
    return graft.copy(given, end.args[0])


def _between(start: torch.fx.Node, end: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes on the way from one marker to another, in order."""
    reached = {start}
    for node in sorted(cone([end])):  # fx nodes compare by their place in the graph
        if any(arg in reached for arg in node.all_input_nodes):
            reached.add(node)
    return sorted(reached - {start, end})


def _own(graft: Graft, source: str, name: str) -> torch.fx.Node:
    weight = graft.program.weights[source]
    own = derive(f"{name}.{source}", weight.type, torch.ops.aten.clone.default, weight)
    if not weight.type.dtype.is_floating_point:
        return graft.fn.weight(weight)
    return graft.weight_of(own)
