"""Merges products that read the same value: query, key and value; gate and up.

Before::

    %q: f32[B,T,32] = aten.linear(%x, @wq)
    %k: f32[B,T,16] = aten.linear(%x, @wk)
    %v: f32[B,T,16] = aten.linear(%x, @wv)

After::

    %m: f32[B,T,64] = aten.linear(%x, @wq+wk+wv)
    %p: (f32[B,T,32], f32[B,T,16], f32[B,T,16]) = aten.split_with_sizes(%m, [32, 16, 16], -1)

One product streams the same bytes as three and starts its threads once; an attention that takes all
three packed needs no split either. Leaves alone weights that something else also uses, and products
of which some have a bias and others none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from ...ir import Function, TensorType, Weight, WeightStore, derive, site_of, type_of

A = torch.ops.aten
G = torch.ops.graftwork

PRODUCTS = frozenset({A.linear.default, G.linear_int8.default})
"""Ops (x, weight, ...) whose every argument after x has the outputs as its first axis."""

# What a projection may go through on its way to attention, one argument each.
_THROUGH = frozenset(
    {
        A.view.default,
        A.reshape.default,
        A._unsafe_view.default,
        A.transpose.int,
        A.permute.default,
        A.clone.default,
        A.contiguous.default,
        A.clamp.default,
        G.rotary.default,
        G.rms_norm.default,
        G.layer_norm.default,
        A.layer_norm.default,
    }
)


def merge_products(fn: Function, weights: WeightStore) -> WeightStore:
    """Edit in place (hand in a copy); returns the weights with the concatenated ones."""
    groups = [_projections(node) for node in fn.calls(G.attend.default)]
    groups += [_gate_up(node) for node in fn.calls(G.glu.default)]
    for group in groups:
        if _mergeable(fn, group):
            weights = _merge(fn, weights, group)
    return weights


def _projections(attend: torch.fx.Node) -> list[torch.fx.Node]:
    """The products behind an attention's query, new keys and new values."""
    q, keys, values = attend.args[:3]
    writes = [n for n in (keys, values) if _is_call(n, G.cache_write.default)]
    return [_product(n) for n in (q, *(w.args[1] for w in writes))]  # type: ignore[union-attr]


def _product(node: Any) -> Any:
    while isinstance(node, torch.fx.Node) and node.target in _THROUGH:
        node = node.args[0]
    return node


def _gate_up(glu: torch.fx.Node) -> list[Any]:
    return list(glu.args[:2])


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is target


def _mergeable(fn: Function, group: Sequence[Any]) -> bool:
    nodes = [n for n in group if isinstance(n, torch.fx.Node) and n.target in PRODUCTS]
    if len(nodes) != len(group) or len(set(nodes)) != len(nodes) or len(nodes) < 2:
        return False
    first = nodes[0]
    same = all(n.args[0] is first.args[0] and n.target is first.target for n in nodes)
    return same and _aligned(nodes) and all(_owned(n) for n in nodes)


def _aligned(nodes: Sequence[torch.fx.Node]) -> bool:
    """Whether the products have the same parts, which differ only in their first axis."""
    shapes = {tuple(_part_type(a) for a in _parts(n)) for n in nodes}
    return len(shapes) == 1


def _part_type(part: Any) -> Any:
    if part is None:
        return None
    return (type_of(part).dtype, type_of(part).dims[1:])


def _parts(node: torch.fx.Node) -> list[Any]:
    """Everything but x, trailing absences dropped."""
    parts = list(node.args[1:])
    while parts and parts[-1] is None:
        parts.pop()
    return parts


def _owned(node: torch.fx.Node) -> bool:
    parts = [p for p in _parts(node) if p is not None]
    return not node.kwargs and all(
        isinstance(p, torch.fx.Node) and p.op == "get_attr" and len(p.users) == 1 for p in parts
    )


def _merge(fn: Function, weights: WeightStore, group: Sequence[torch.fx.Node]) -> WeightStore:
    first = min(group)  # fx nodes compare by their place in the graph
    columns = [_parts(node) for node in group]
    sizes = [type_of(parts[0]).dims[0] for parts in columns]
    with fn.graph.inserting_before(first):
        joined = []
        for parts in zip(*columns, strict=True):
            weight = None if parts[0] is None else _joined(weights, parts)
            if weight is not None:
                weights = weights if weight.name in weights else weights.adding(weight)
            joined.append(None if weight is None else fn.weight(weight))
        site = site_of(first)
        merged = fn.call(first.target, first.args[0], *joined, site=site)  # type: ignore[arg-type]
        split = fn.call(A.split_with_sizes.default, merged, sizes, -1, site=site)
        pieces = [fn.item(split, index) for index in range(len(group))]
    for node, piece in zip(group, pieces, strict=True):
        node.replace_all_uses_with(piece)
        fn.graph.erase_node(node)
    return weights


def _joined(weights: WeightStore, parts: Sequence[torch.fx.Node]) -> Weight:
    """The parts' weights, one after the other along their first axis."""
    sources = [weights[str(part.target)] for part in parts]
    head = sources[0].type
    rows = sum(int(str(w.type.dims[0])) for w in sources)
    joined = TensorType(head.dtype, (rows, *head.dims[1:]))
    name = "+".join(w.name for w in sources)
    return derive(name, joined, lambda *tensors: torch.cat(tensors), *sources)
