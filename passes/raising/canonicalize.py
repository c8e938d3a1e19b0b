"""Write what is left one way only, and declare the program canonical.

Before::

    %a: f32[B*T,8] = aten.reshape(%x, [B*T, 8])
    %b: f32[B*T,4] = aten.linear(%a, @w)
    %c: f32[B,T,4] = aten.view(%b, [B, T, -1])
    %d: f32[B,T,4] = aten.mul.Tensor(%c, 1.0)

After::

    %b: f32[B,T,4] = aten.linear(%x, @w)

Values have no storage, so views, copies and aliases mean nothing: every reshape is aten.reshape
with all sizes written out, every exchange of axes is aten.permute. What changes nothing goes
(casts to the same dtype, full slices, reshapes and expansions to the same dims, products with one,
dropout), chains of reshapes and of permutations become one, a linear layer takes its input
unflattened. Equal calls are merged and dead ones removed. Requires the raising passes, since it
says that they had their turn. Refuses nothing; a program in this form already only changes its
stage.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import Function, Program, TensorType, site_of, type_of
from ...ir.rewrite.cleanup import merge_equal, sweep
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_each

A = torch.ops.aten

COPIES = frozenset(
    {
        *(A.alias.default, A.clone.default, A.contiguous.default, A.detach.default),
        *(A.lift_fresh_copy.default, A._to_copy.default, A.to.dtype, A.expand.default),
        *(A.repeat.default, A.constant_pad_nd.default),
    }
)
RESHAPES = frozenset({A.view.default, A.reshape.default, A._unsafe_view.default, A.squeeze.dim})
PERMUTES = frozenset({A.permute.default, A.transpose.int, A.t.default})
NEUTRAL = {A.mul.Tensor: 1, A.div.Tensor: 1, A.add.Tensor: 0, A.sub.Tensor: 0}
WIDER = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 2, torch.float64: 3}


@register
class Canonicalize(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"activations", "norms", "rotary", "glu"})
    provides: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def run(self, program: Program) -> Outcome:
        outcome = edit_each(program, _rewrite)
        stage = "canonical" if program.stage == "traced" else program.stage
        changed = outcome.matches + (stage != program.stage)
        if not changed:
            return Outcome(program, 0, f"the program is canonical (stage {stage})")
        return Outcome(outcome.program.replace(stage=stage).pruned(), changed)


def _rewrite(fn: Function) -> int:
    """One pass from the inputs on: arguments are in their final form when a node is looked at."""
    count = 0
    for node in fn:
        if node.op != "call_function" or not isinstance(node.meta["type"], TensorType):
            continue
        with fn.graph.inserting_before(node):
            new = _simpler(fn, node)
        if new is not None:
            node.replace_all_uses_with(new)
            count += 1
    return count + sweep(fn) + merge_equal(fn)


def _simpler(fn: Function, node: torch.fx.Node) -> torch.fx.Node | None:
    """What can stand for a node, or None if it is in its final form."""
    if node.target in RESHAPES:
        return _reshape(fn, node)
    if node.target in PERMUTES:
        return _permute(fn, node)
    if node.target is A.linear.default:
        return _linear(fn, node)
    if node.target is A.cat.default and len(node.args[0]) == 1:  # type: ignore[arg-type]
        return node.all_input_nodes[0]
    return _source_if_same(node)


def _source_if_same(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument of a copy, cast, slice or sum that changes nothing."""
    source = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node):
        return None
    if node.target is A._to_copy.default and source.target is A._to_copy.default:
        first = source.all_input_nodes[0]
        widened = WIDER.get(type_of(source).dtype, 0) > WIDER.get(type_of(first).dtype, 9)
        if widened and type_of(first) == type_of(node):
            return first
    if source.meta["type"] != node.meta["type"]:
        return None
    whole = node.target is A.slice.Tensor and node.args[4:] in ((), (1,))
    neutral = node.target in NEUTRAL and node.args[1:] == (NEUTRAL[node.target],)
    dropout = node.target is A.dropout.default and node.args[2] is False
    same = node.target in COPIES or whole or dropout or (neutral and not node.kwargs)
    return source if same else None


def _reshape(fn: Function, node: torch.fx.Node) -> torch.fx.Node | None:
    dims, source = list(type_of(node).dims), node.all_input_nodes[0]
    while source.target in (A.reshape.default, A.unsqueeze.default):
        source = source.all_input_nodes[0]
    if list(type_of(source).dims) == dims:
        return source
    if node.target is A.reshape.default and node.args == (source, dims):
        return None
    return fn.call(A.reshape.default, source, dims, site=site_of(node))


def _permute(fn: Function, node: torch.fx.Node) -> torch.fx.Node | None:
    source, order = node.all_input_nodes[0], _order(node)
    if source.target is A.permute.default:
        inner = _order(source)
        source, order = source.all_input_nodes[0], [inner[axis] for axis in order]
    if order == sorted(order):
        return source
    if node.target is A.permute.default and node.args == (source, order):
        return None
    return fn.call(A.permute.default, source, order, site=site_of(node))


def _order(node: torch.fx.Node) -> list[int]:
    """Which axis of the argument each axis of the result is."""
    rank = len(type_of(node).dims)
    if node.target is A.permute.default:
        return [int(axis) % rank for axis in node.args[1]]  # type: ignore[union-attr, arg-type]
    order = list(range(rank))
    first, second = node.args[1:] if node.target is A.transpose.int else (0, rank - 1)
    order[first], order[second] = order[second], order[first]  # type: ignore[index]
    return order


def _linear(fn: Function, node: torch.fx.Node) -> torch.fx.Node | None:
    """Flattening before a linear layer moves behind it, where it meets its inverse."""
    flat = node.args[0]
    assert isinstance(flat, torch.fx.Node)
    if flat.target is not A.reshape.default:
        return None
    source = flat.all_input_nodes[0]
    if type_of(source).dims[-1:] != type_of(flat).dims[-1:]:
        return None
    rest: dict[str, Any] = dict(node.kwargs)
    wide = fn.call(A.linear.default, source, *node.args[1:], site=site_of(node), **rest)
    return fn.call(A.reshape.default, wide, list(type_of(node).dims), site=site_of(node))
