"""Removes moves that cancel: copies, casts to the same dtype, double reshapes and transposes.

Before::

    %a: f32[B,T,4,8] = aten.view(%x, [B, T, 4, 8])
    %b: f32[B,4,T,8] = aten.transpose.int(%a, 1, 2)
    %c: f32[B,T,4,8] = aten.permute(%b, [0, 2, 1, 3])
    %d: f32[B,T,32] = aten.view(%c, [B, T, 32])

After: ``%x`` in the place of ``%d``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ...ir import Function, arguments, site_of, type_of
from ...ir.rewrite.cleanup import sweep
from .calls import source_of

A = torch.ops.aten

COPIES = frozenset(
    {
        A.clone.default,
        A.contiguous.default,
        A.alias.default,
        A.detach.default,
        A.lift_fresh_copy.default,
        A.dropout.default,
        A.to.dtype,
        A.to.device,
        A.to.dtype_layout,
        A._to_copy.default,
        A.type_as.default,
        A.expand.default,
    }
)
RESHAPES = frozenset(
    {A.view.default, A.reshape.default, A._unsafe_view.default, A.flatten.using_ints}
)
TURNS = frozenset({A.transpose.int, A.permute.default})


def simplify_views(fn: Function) -> int:
    """Edit in place (hand in a copy); returns how many nodes were bypassed."""
    count = 0
    for node in fn.calls():
        replacement = _simpler(fn, node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            count += 1
    sweep(fn)
    return count


def _simpler(fn: Function, node: torch.fx.Node) -> torch.fx.Node | None:
    source = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node) or not node.users:
        return None
    if node.target in COPIES:
        return source if type_of(source) == type_of(node) else None
    if node.target in RESHAPES:
        return _reshape(fn, node, source)
    return _turn(source, node) if node.target in TURNS else None


def join_heads(fn: Function) -> None:
    """Put heads together where they lie: of ``cat([transpose(view(x)), ...], 1)``, each [B,H,T,D],
    the values x [B,T,H*D] are put together instead. Edits in place."""
    for node in fn.calls(A.cat.default):
        given = arguments(node)
        parts = [_flat(part) for part in given["tensors"]]
        if given["dim"] != 1 or any(part is None for part in parts):
            continue
        batch, heads, width, dim = type_of(node).dims
        with fn.graph.inserting_before(node):
            flat = fn.call(A.cat.default, parts, 2, site=site_of(node))
            spread = fn.call(A.view.default, flat, [batch, width, heads, dim], site=site_of(node))
            joined = fn.call(A.transpose.int, spread, 1, 2, site=site_of(node))
        node.replace_all_uses_with(joined)
    sweep(fn)


def _flat(node: torch.fx.Node) -> torch.fx.Node | None:
    """x [B,T,H*D] of a node that is x as [B,H,T,D]."""
    if node.target not in TURNS or axis_order(node) != [0, 2, 1, 3]:
        return None
    view = source_of(node)
    whole = source_of(view) if view.target in RESHAPES else None
    batch, width, heads, dim = type_of(view).dims
    if whole is None or not isinstance(heads, int) or not isinstance(dim, int):
        return None
    return whole if list(type_of(whole).dims) == [batch, width, heads * dim] else None


def _reshape(fn: Function, node: torch.fx.Node, source: torch.fx.Node) -> torch.fx.Node | None:
    root = source
    while root.target in RESHAPES:
        root = source_of(root)
    if type_of(root) == type_of(node):
        return root
    if root is source:
        return None
    with fn.graph.inserting_before(node):
        dims = list(type_of(node).dims)
        return fn.call(A.reshape.default, root, dims, site=site_of(node))


def _turn(source: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node | None:
    order = axis_order(node)
    if order == sorted(order):
        return source
    if source.target not in TURNS:
        return None
    inner = axis_order(source)
    whole = [inner[axis] for axis in order]
    return source_of(source) if whole == sorted(whole) else None


def axis_order(node: torch.fx.Node) -> list[int]:
    """The permutation that a transpose or permute applies."""
    rank = len(type_of(node).dims)
    order, given = list(range(rank)), arguments(node)
    if node.target is A.permute.default:
        return [int(a) % rank for a in given["dims"]]
    a, b = int(given["dim0"]) % rank, int(given["dim1"]) % rank
    order[a], order[b] = order[b], order[a]
    return order


def packed_of(parts: list[torch.fx.Node]) -> torch.fx.Node | None:
    """The value that query, key and value are the pieces of, in this order and completely."""
    pieces = [piece for part in parts if (piece := _piece(part)) is not None]
    if len(pieces) < len(parts):
        return None
    source, at = pieces[0][0], 0
    for origin, start, end in pieces:
        if origin is not source or start != at:
            return None
        at = end
    return source if at == type_of(source).dims[-1] else None


def _piece(node: torch.fx.Node) -> tuple[torch.fx.Node, int, int] | None:
    """(source, start, end) of a node that is part of another along the last axis."""
    if node.target is A.slice.Tensor:
        return _sliced(node)
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node) or not isinstance(source.meta["type"], tuple):
        return None
    if source.target not in (A.split_with_sizes.default, A.split.Tensor, A.chunk.default):
        return None
    if not _is_last_axis(source_of(source), arguments(source)["dim"]):
        return None
    sizes = [int(str(t.dims[-1])) for t in source.meta["type"]]
    index = int(str(node.args[1]))
    return source_of(source), sum(sizes[:index]), sum(sizes[: index + 1])


def _sliced(node: torch.fx.Node) -> tuple[torch.fx.Node, int, int] | None:
    given = arguments(node)
    source, start = given["self"], given["start"] or 0
    width, size = type_of(source).dims[-1], type_of(node).dims[-1]
    if not (isinstance(width, int) and isinstance(size, int) and isinstance(start, int)):
        return None
    if not _is_last_axis(source, given["dim"]) or given["step"] != 1:
        return None
    return source, start % width, start % width + size


def _is_last_axis(source: Any, axis: int) -> bool:
    return axis % len(type_of(source).dims) == len(type_of(source).dims) - 1
