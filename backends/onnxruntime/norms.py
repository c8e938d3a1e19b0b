"""Fuses a residual addition and the normalisation that follows it.

Before::

    %h: f32[B,T,64] = aten.add.Tensor(%x, %y)
    %n: f32[B,T,64] = graftwork.rms_norm(%h, @w, eps=1e-06)

After::

    %r: (f32[B,T,64], f32[B,T,64]) = graftwork.add_rms_norm(%x, %y, @w, eps=1e-06)

with %r[0] for %n and %r[1] for %h; the same for `layer_norm`. A sum that several normalisations
read is fused with the first.

A step that is cut has, in front of a segment's first normalisation, the rows of a sum that the
segment before has made, and a step that exchanges some rows the others of a sum. It is fused with a
sum of those and nothing, because the two kernels round differently, and neither must change what 8
bits make of a row.
"""

from __future__ import annotations

import torch
import torch.fx

from ...ir import Function, TensorType, arguments, site_of, type_of
from .calls import source_of

A = torch.ops.aten
G = torch.ops.graftwork


def fuse_norms(fn: Function) -> int:
    """Edit in place (hand in a copy); returns how many pairs were fused."""
    count = 0
    for node in fn.calls(G.rms_norm.default, G.layer_norm.default):
        total = source_of(node)
        if _is_handed_on(total):
            total = _with_nothing(fn, node, total)
        if not _is_plain_sum(total, type_of(node)) or not _before(total, node):
            continue
        _fuse(fn, node, total)
        count += 1
    return count


def _is_handed_on(rows: torch.fx.Node) -> bool:
    """Whether they are all rows that the segment before has made (a head reads chosen ones), or
    those of a sum, some of them exchanged."""
    if rows.target is A.where.self:
        return any(_is_plain_sum(kept, type_of(rows)) for kept in rows.all_input_nodes)
    columns = rows.args[2] if rows.target is G.cache_read.default else None
    return isinstance(columns, torch.fx.Node) and columns.op != "placeholder"


def _with_nothing(fn: Function, node: torch.fx.Node, rows: torch.fx.Node) -> torch.fx.Node:
    """The rows, as a sum that a norm reads alone."""
    with fn.graph.inserting_before(node):
        nothing = fn.call(A.sub.Tensor, rows, rows)
        total = fn.call(A.add.Tensor, rows, nothing)
    node.update_arg(0, total)
    return total


def _is_plain_sum(total: torch.fx.Node, normed: TensorType) -> bool:
    if total.target is not A.add.Tensor or total.kwargs.get("alpha", 1) != 1:
        return False
    a, b = total.args[:2]
    if not (isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node)):
        return False
    return len(normed.dims) == 3 and type_of(a) == type_of(b) == type_of(total) == normed


def _before(total: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether the norm's weights are at hand where the sum is made."""
    rest = [n for n in node.all_input_nodes if n is not total]
    return all(n.op == "get_attr" for n in rest)


def _fuse(fn: Function, node: torch.fx.Node, total: torch.fx.Node) -> None:
    given, site = arguments(node), site_of(node)
    with fn.graph.inserting_before(total):
        vectors = [_again(fn, given.get(name)) for name in ("weight", "bias")]
        if node.target is G.rms_norm.default:
            made = fn.call(
                G.add_rms_norm.default, *total.args[:2], vectors[0], site=site, eps=given["eps"]
            )
        else:
            made = fn.call(
                G.ort_add_layer_norm.default, *total.args[:2], *vectors, site=site, eps=given["eps"]
            )
        normed, summed = fn.item(made, 0), fn.item(made, 1)
    node.replace_all_uses_with(normed)
    total.replace_all_uses_with(summed)
    fn.graph.erase_node(node)
    fn.graph.erase_node(total)


def _again(fn: Function, node: torch.fx.Node | None) -> torch.fx.Node | None:
    if node is None:
        return None
    copy = fn.graph.create_node("get_attr", str(node.target))
    copy.meta = dict(node.meta)
    return copy
