"""Put markers on the residual stream at every block's attention and MLP boundary.

The residual stream is found in the graph, not by module names: its values *dominate* the logits
(all paths from the tokens to the logits run through them), and a block's boundary is a sum of two
values [B,T,H] that dominates the logits: what went around the branch and what came out of it.

Before::

    %x1 = aten.add.Tensor(%x0, %attn)
    %x2 = aten.add.Tensor(%x1, %mlp)

After::

    %x1 = aten.add.Tensor(%x0, %attn)
    %h1 = graftwork.hidden(%x1, layer=0, point="attention")
    %x2 = aten.add.Tensor(%h1, %mlp)
    %h2 = graftwork.hidden(%x2, layer=0, point="block")

A block whose attention and MLP run side by side has one boundary, "block". Attention to a source
behind a block's own counts as a part of it. Blocks that normalise
after the sum (OpenAI GPT) have their marker behind the normalisation, where the next block reads.
Refuses, naming the layer, a model with several residual streams.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.fx

from ..ir import Function, Site, TensorType, UnsupportedError, site_of, type_of
from ..ir.execution.analysis import dominating_chain
from .number_layers import MIXERS

A, G = torch.ops.aten, torch.ops.graftwork


def mark_hidden(fn: Function) -> int:
    """Insert the markers in place; returns the number of blocks.

    Errors: `UnsupportedError` if no tokens meet anywhere, or a block has no boundary.
    """
    spine = dominating_chain(fn)
    # Where no token meets those before it alone, all meet all, as in masked language models.
    mixers = fn.calls(*MIXERS) or fn.calls(G.source_attention.default)
    if not mixers:
        raise UnsupportedError(
            "the model has no attention and no recurrence that could be found; graftwork handles "
            "causal language models made of blocks of these"
        )
    order = {node: index for index, node in enumerate(fn)}
    hidden = _stream_type(spine)
    blocks: list[_Block] = []
    to_source = [order[node] for node in fn.calls(G.source_attention.default)]
    for segment in _segments(spine, mixers, order):
        last = max((at for at in to_source if at < order[segment[-1]]), default=-1)
        sums = [i for i, n in enumerate(segment) if order[n] > last and _is_sum(n, hidden)]
        if not sums:
            raise UnsupportedError(
                f"block {len(blocks)} ({_place(mixers, len(blocks))}): its output is not one "
                "residual stream [B,T,H]; models with several streams are not supported yet"
            )
        blocks.append(_Block(segment, sums))
    ahead = [n for n in spine if order[n] < order[mixers[0]] and type_of(n) == hidden]
    if ahead:
        _insert(fn, ahead[-1], -1, "embedding")
    trail = _trail(blocks, hidden)
    for index, block in enumerate(blocks):
        if len(block.sums) > 1:
            stop = block.sums[1]
            _insert(fn, _last(block.nodes[block.sums[0] : stop], hidden), index, "attention")
        stop = block.sums[-1] + trail + 1
        _insert(fn, _last(block.nodes[block.sums[-1] : stop], hidden), index, "block")
    return len(blocks)


@dataclass(frozen=True)
class _Block:
    """A block's stretch of the spine, and where in it the sums are."""

    nodes: list[torch.fx.Node]
    sums: list[int]


def _trail(blocks: list[_Block], hidden: TensorType) -> int:
    """How many values of the spine follow a block's last sum before the next block begins.

    None where blocks normalise what they read; the normalisation where they normalise what they
    write. The last block cannot tell: the model's final norm follows it.
    """
    first = blocks[0]
    if len(blocks) > 1:
        return len(first.nodes) - 1 - first.sums[-1]
    after = first.nodes[first.sums[-1] :]
    return next(i for i, node in enumerate(after) if type_of(node) == hidden)


def _last(nodes: list[torch.fx.Node], hidden: TensorType) -> torch.fx.Node:
    """The last value of the stream's type among these."""
    return [node for node in nodes if type_of(node) == hidden][-1]


def _stream_type(spine: list[torch.fx.Node]) -> TensorType:
    """The type [B,T,H] of what most sums of the spine compute: those of blocks, not of a head.

    Errors: `UnsupportedError` if no sum dominates the logits.
    """
    batch_and_tokens = type_of(spine[0]).dims
    kinds = Counter(
        TensorType(type_of(node).dtype, (*batch_and_tokens, type_of(node).dims[-1]))
        for node in spine[1:]
        if node.target is A.add.Tensor and _is_sum(node, type_of(node))
    )
    if not kinds:
        raise UnsupportedError("the model has no residual stream: no sum runs through every path")
    return kinds.most_common(1)[0][0]


def _segments(
    spine: list[torch.fx.Node], mixers: list[torch.fx.Node], order: dict[torch.fx.Node, int]
) -> list[list[torch.fx.Node]]:
    """The stretch of the spine behind what mixes a block's tokens, up to the next block's.

    Two with no spine between them (differential attention, a convolution before a recurrence)
    belong to one block.
    """
    segments = []
    for start, stop in pairwise([*(order[node] for node in mixers), len(order)]):
        segment = [node for node in spine if start < order[node] < stop]
        if segment:
            segments.append(segment)
    return segments


def _is_sum(node: torch.fx.Node, hidden: TensorType) -> bool:
    """Whether a node adds two computed values of the stream [B,T,H] or [B*T,H]."""
    parts = [arg for arg in node.args[:2] if isinstance(arg, torch.fx.Node)]
    computed = [part for part in parts if part.op == "call_function"]
    if node.target is not A.add.Tensor or len(computed) != 2:
        return False
    same = type_of(node).dims[-1] == hidden.dims[-1]
    return same and all(type_of(part) == type_of(node) for part in computed)


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


def _place(mixers: list[torch.fx.Node], index: int) -> str:
    site = site_of(mixers[min(index, len(mixers) - 1)])
    return site.module or "unknown module"
