"""Reads the rows of a step's tokens in one kernel.

Before::

    %count: i64[T] = aten.arange.start_step(0, T, 1, dtype=i64)
    %row: i64[1,T] = aten.unsqueeze(%count, 0)
    %columns: i64[B,T] = aten.expand(%row, [B, T])
    %h: f32[B,T,64] = graftwork.cache_read(%stream, %past, %columns)

After::

    %h: f32[B,T,64] = graftwork.ort_read_rows(%stream, %past, %positions)

Every part of a step that is cut begins so, and with a dozen small nodes it takes longer than the
call itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ...ir import Function, site_of, type_of
from . import ops  # noqa: F401  (defines ort_read_rows)
from .rows_attention import has_own_read

A = torch.ops.aten
G = torch.ops.graftwork


def read_fed_rows(fn: Function) -> int:
    """Edit in place (hand in a copy); returns how many reads there were."""
    count = 0
    for node in fn.calls(G.cache_read.default):
        like = _of_size(fn, node.args[2])
        if like is None or not has_own_read(node):
            continue
        with fn.graph.inserting_before(node):
            rows = fn.call(G.ort_read_rows.default, *node.args[:2], like, site=site_of(node))
        node.replace_all_uses_with(rows)
        fn.graph.erase_node(node)
        count += 1
    return count


def _of_size(fn: Function, columns: Any) -> torch.fx.Node | None:
    """Of columns 0, 1, ... in every sequence the input i64[B,T] that has as many; else None."""
    row = _source(columns, A.expand.default)
    count = _source(row, A.unsqueeze.default)
    if count is None or count.target is not A.arange.start_step:
        return None
    kind = type_of(columns)
    if count.args[0] != 0 or (count.args[2:] or (1,))[0] != 1 or len(kind.dims) != 2:
        return None
    return next((node for node in fn.inputs if type_of(node) == kind), None)


def _source(node: Any, target: Any) -> torch.fx.Node | None:
    """What a call of `target` is of; None if it is none."""
    if not isinstance(node, torch.fx.Node) or node.target is not target:
        return None
    source = node.args[0]
    return source if isinstance(source, torch.fx.Node) else None
