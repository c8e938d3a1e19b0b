"""Give every attention a layer number of its own: it names the cache that it will own."""

from __future__ import annotations

import torch

from ..ir import Function, site_of

G = torch.ops.graftwork


def number_layers(fn: Function) -> None:
    """Number attentions in place: by the layer of their module, or, where two attentions share a
    layer or the path holds no index, in the order of the graph.
    """
    attentions = fn.calls(G.attention.default)
    layers = [site_of(node).layer for node in attentions]
    if None in layers or len(set(layers)) != len(layers):
        layers = list(range(len(attentions)))
    for node, layer in zip(attentions, layers, strict=True):
        node.kwargs = {**node.kwargs, "layer": layer}
