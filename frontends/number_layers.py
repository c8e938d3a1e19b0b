"""Give every attention, recurrence and convolution a layer number of its own among its kind: it
names the states that it will own."""

from __future__ import annotations

import torch

from ..ir import Function, site_of

G = torch.ops.graftwork
MIXERS = (G.attention.default, G.linear_attention.default, G.causal_conv.default)
"""The ops in which tokens of a sequence meet."""

NUMBERED = (*MIXERS, G.source_attention.default)


def number_layers(fn: Function) -> None:
    """Number them in place: by the layer of their module, or, where two of a kind share a layer or
    the path holds no index, in the order of the graph.
    """
    for kind in NUMBERED:
        nodes = fn.calls(kind)
        layers = [site_of(node).layer for node in nodes]
        if None in layers or len(set(layers)) != len(layers):
            layers = list(range(len(nodes)))
        for node, layer in zip(nodes, layers, strict=True):
            node.kwargs = {**node.kwargs, "layer": layer}
