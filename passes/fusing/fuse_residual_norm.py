"""Add to the residual stream and normalise the sum in one op.

Before::

    %s: f32[B,T,H] = aten.add.Tensor(%x, %y)
    %h: f32[B,T,H] = graftwork.hidden(%s, layer=0, point="attention")
    %n: f32[B,T,H] = graftwork.rms_norm(%h, @w, eps=1e-06)

After::

    %r: (f32[B,T,H], f32[B,T,H]) = graftwork.add_rms_norm(%x, %y, @w, eps=1e-06)
    %h: f32[B,T,H] = graftwork.hidden(%r[1], layer=0, point="attention")

with %r[0] for %n. A sum that several norms read is fused with the first. Markers stay, used or
not. Leaves alone sums that broadcast or scale, and norms of anything else. Nothing may still
change what lies between a block's sum and its norm, so this runs after the passes that have an
effect on layers or logits, and after those that add functions or cut the step into segments.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.fx

from ...ir import Function, Program, site_of, type_of
from ..engine.base import Effect, Outcome, Pass, register
from ..engine.functions import edit_each

A, G = torch.ops.aten, torch.ops.graftwork


@register
class FuseResidualNorm(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    reads: ClassVar[frozenset[Effect]] = frozenset(
        {
            Effect.HIDDEN_BASIS,
            Effect.LAYER_SET,
            Effect.PLACEMENT,
            Effect.LOGITS,
            Effect.FUNCTIONS,
            Effect.SEGMENTS,
        }
    )

    def run(self, program: Program) -> Outcome:
        return edit_each(program, _fused)


def _fused(fn: Function) -> int | str:
    count, near_miss = 0, "no graftwork.rms_norm"
    for node in fn.calls(G.rms_norm.default):
        total = _through_markers(node.args[0])
        if not _plain_sum(total, node):
            near_miss = f"%{node.name} normalises {total}, not a sum of two values of its type"
            continue
        _fuse(fn, node, total)
        count += 1
    return count or near_miss


def _through_markers(node: object) -> torch.fx.Node:
    assert isinstance(node, torch.fx.Node)
    while node.target is G.hidden.default:
        assert isinstance(node.args[0], torch.fx.Node)
        node = node.args[0]
    return node


def _plain_sum(total: torch.fx.Node, norm: torch.fx.Node) -> bool:
    if total.target is not A.add.Tensor or total.kwargs:
        return False
    weight = norm.args[1]
    terms = [a for a in total.args if isinstance(a, torch.fx.Node)]
    same = len(terms) == 2 and all(type_of(term) == type_of(norm) for term in terms)
    return same and isinstance(weight, torch.fx.Node) and weight.op == "get_attr"


def _fuse(fn: Function, norm: torch.fx.Node, total: torch.fx.Node) -> None:
    weight = norm.args[1]
    assert isinstance(weight, torch.fx.Node)
    with fn.graph.inserting_before(total):
        again = fn.graph.node_copy(weight)
        fused = fn.call(
            G.add_rms_norm.default, *total.args, again, site=site_of(norm), eps=norm.kwargs["eps"]
        )
        normed, summed = fn.item(fused, 0), fn.item(fused, 1)
    norm.replace_all_uses_with(normed)
    total.replace_all_uses_with(summed)
    for node in (norm, total, weight):
        if not node.users:
            fn.graph.erase_node(node)
