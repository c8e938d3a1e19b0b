"""Rotations of queries and keys whose angles are looked up in tables by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import arguments, type_of

A = torch.ops.aten
G = torch.ops.graftwork


@dataclass
class Tables:
    """Where a rotary embedding's angles come from: weights [context, R/2] and their dtype."""

    cos: torch.fx.Node
    sin: torch.fx.Node
    interleaved: bool


def rotation_of(
    q: torch.fx.Node,
    k: torch.fx.Node,
    positions: torch.fx.Node,
    turns: Callable[[int, int], bool],
) -> tuple[torch.fx.Node, torch.fx.Node, Tables | None]:
    """Query and key before their rotary embedding, and its tables, if the kernel can apply it."""
    apart = (q, k, None)
    if q.target is not G.rotary.default or k.target is not G.rotary.default:
        return apart
    of_q, of_k = arguments(q), arguments(k)
    if any(of_q[name] != of_k[name] for name in ("cos", "sin", "interleaved")):
        return apart
    cos, sin = (table_of(of_q[name], positions) for name in ("cos", "sin"))
    if cos is None or sin is None:
        return apart
    width, half = type_of(q).dims[3], type_of(cos).dims[1]
    if not isinstance(width, int) or not isinstance(half, int) or not turns(width, half):
        return apart
    return of_q["x"], of_k["x"], Tables(cos, sin, bool(of_q["interleaved"]))


def table_of(node: Any, positions: torch.fx.Node) -> torch.fx.Node | None:
    """The weight that `node` looks the positions up in."""
    while node.target is A._to_copy.default:
        node = node.args[0]
    if node.target is not A.embedding.default or node.args[1] is not positions:
        return None
    table = node.args[0]
    return table if table.op == "get_attr" else None
