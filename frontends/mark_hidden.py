"""Put markers on the residual stream at every block's attention and MLP boundary.

The residual stream is found in the graph, not by module names: its values *dominate* the logits (all
paths from the tokens to the logits run through them), and a block's boundary is a sum of two values
[B,T,H] that dominates the logits: what went around the branch and what came out of it.

Before::

    %x1 = aten.add.Tensor(%x0, %attn)
    %x2 = aten.add.Tensor(%x1, %mlp)

After::

    %x1 = aten.add.Tensor(%x0, %attn)
    %h1 = graftwork.hidden(%x1, layer=0, point="attention")
    %x2 = aten.add.Tensor(%h1, %mlp)
    %h2 = graftwork.hidden(%x2, layer=0, point="block")

A block whose attention and MLP run side by side has one boundary, "block". Blocks that normalise
after the sum (OpenAI GPT) have their marker behind the normalisation, where the next block reads.
Refuses, naming the layer, a model with several residual streams.
"""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import torch
import torch.fx

from ..ir import Function, Site, UnsupportedError, site_of, type_of

A, G = torch.ops.aten, torch.ops.graftwork


def mark_hidden(fn: Function) -> int:
    """Insert the markers in place; returns the number of blocks.

    Errors: `UnsupportedError` if there is no attention, or a block has no boundary.
    """
    spine = _spine(fn)
    attentions = fn.calls(G.attention.default)
    if not attentions:
        raise UnsupportedError(
            "the model has no attention that could be found; graftwork handles causal language "
            "models made of attention blocks"
        )
    order = {node: index for index, node in enumerate(fn)}
    segments = _segments(spine, attentions, order)
    stream = [node for segment in segments for node in segment if _is_sum(node)]
    hidden = type_of(stream[-1]) if stream else None
    boundaries = []
    for block, segment in enumerate(segments):
        sums = [node for node in segment if _is_sum(node) and type_of(node) == hidden]
        if not sums:
            raise UnsupportedError(
                f"block {block} ({_place(attentions, block)}): its output is not one residual "
                "stream [B,T,H]; models with several streams are not supported yet"
            )
        boundaries.append((segment, sums))
    _insert_all(fn, spine, order, attentions[0], boundaries)
    return len(boundaries)


def _insert_all(
    fn: Function,
    spine: list[torch.fx.Node],
    order: dict[torch.fx.Node, int],
    first: torch.fx.Node,
    boundaries: list[tuple[list[torch.fx.Node], list[torch.fx.Node]]],
) -> None:
    hidden = type_of(boundaries[-1][1][-1])
    ahead = [n for n in spine if order[n] < order[first] and type_of(n) == hidden]
    if ahead:
        _insert(fn, ahead[-1], -1, "embedding")
    trail = _trail(boundaries)
    for block, (segment, sums) in enumerate(boundaries):
        if len(sums) > 1:
            _insert(fn, _behind(segment, sums[0], trail), block, "attention")
        _insert(fn, _behind(segment, sums[-1], trail), block, "block")


def _trail(boundaries: list[tuple[list[torch.fx.Node], list[torch.fx.Node]]]) -> int:
    """How many values of the stream follow a block's last sum before the next block begins.

    None where blocks normalise what they read; the normalisation where they normalise what they
    write. The last block tells nothing: the model's final norm follows it.
    """
    if len(boundaries) < 2:
        return 0
    segment, sums = boundaries[0]
    return len(segment) - 1 - segment.index(sums[-1])


def _behind(segment: list[torch.fx.Node], node: torch.fx.Node, trail: int) -> torch.fx.Node:
    return segment[min(segment.index(node) + trail, len(segment) - 1)]


def _spine(fn: Function) -> list[torch.fx.Node]:
    """The nodes that every path from the tokens to the logits runs through, in order."""
    source, target = fn.input("tokens"), fn.outputs["logits"]
    graph = nx.DiGraph()
    for node in fn.calls():
        graph.add_edges_from((arg, node) for arg in node.all_input_nodes)
    if target not in graph or not nx.has_path(graph, source, target):
        raise UnsupportedError("the logits do not depend on the tokens")
    dominator = nx.immediate_dominators(graph, source)
    spine = [target]
    while spine[-1] is not source:
        spine.append(dominator[spine[-1]])
    return spine[::-1]


def _segments(
    spine: list[torch.fx.Node], attentions: list[torch.fx.Node], order: dict[torch.fx.Node, int]
) -> list[list[torch.fx.Node]]:
    """The stretch of the spine behind each block's attention, up to the next block's.

    Two attentions with no spine between them (differential attention) belong to one block.
    """
    starts = [order[node] for node in attentions]
    segments = []
    for start, stop in pairwise([*starts, len(order)]):
        segment = [node for node in spine if start < order[node] < stop]
        if any(_is_sum(node) for node in segment):
            segments.append(segment)
    return segments


def _is_sum(node: torch.fx.Node) -> bool:
    """Whether a node adds two computed values of one type [B,T,H]."""
    if node.target is not A.add.Tensor or len(type_of(node).dims) != 3:
        return False
    parts = [arg for arg in node.args[:2] if isinstance(arg, torch.fx.Node)]
    computed = [part for part in parts if part.op == "call_function"]
    return len(computed) == 2 and all(type_of(part) == type_of(node) for part in computed)


def _insert(fn: Function, node: torch.fx.Node, layer: int, point: str) -> None:
    if node.target is G.hidden.default:
        return
    site = site_of(node)
    site = Site(site.module, None if layer < 0 else layer, site.line)
    users = list(node.users)
    with fn.graph.inserting_after(node):
        marker = fn.call(G.hidden.default, node, site=site, layer=layer, point=point)
    for user in users:
        user.replace_input_with(node, marker)


def _place(attentions: list[torch.fx.Node], index: int) -> str:
    site = site_of(attentions[min(index, len(attentions) - 1)])
    return site.module or "unknown module"
