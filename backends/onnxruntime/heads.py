"""Which heads of wider operands an attention takes, and where the latest rows stand.

Of ``%q: f32[B,3,T,D] = aten.slice.Tensor(%all_q, 1, 3, 6)`` and keys that are sliced likewise these
are the heads from key 1 on; of keys that are unsqueezed, expanded and reshaped the heads of a cache
that hold one key each. Positions from which ``positions[:, 0] - past`` is taken are those of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ...ir import arguments, type_of

A = torch.ops.aten


@dataclass(frozen=True)
class Heads:
    """Query, key and value [B,*,T,*] with all their heads; options: of `ort_attend`, which say
    which of these are taken."""

    q: torch.fx.Node
    k: torch.fx.Node
    v: torch.fx.Node
    options: dict[str, Any] = field(default_factory=dict)


def heads_of(q: torch.fx.Node, k: torch.fx.Node, v: torch.fx.Node) -> Heads | None:
    """What these are made from; None if a kernel cannot take that apart."""
    key, value = _repeated(k), _repeated(v)
    if key[1] != value[1]:
        return None
    (all_k, first, repeat), (all_v, other, _) = (_sliced(*of) for of in (key, value))
    (all_q, start, _), own = _sliced(q, 1), _count(k) // repeat
    each, keys = _count(q) // own, _count(all_k)
    fits = first == other and keys == _count(all_v) and start == first * each
    if not fits or _count(all_q) != keys * each:
        return None
    options = {"repeat": repeat} if repeat > 1 else {}
    return Heads(all_q, all_k, all_v, options | ({} if keys == own else _some(first, keys)))


def _some(first: int, keys: int) -> dict[str, int]:
    return {"first": first, "keys": keys}


def latest_of(positions: torch.fx.Node, past: torch.fx.Node) -> torch.fx.Node | None:
    """The text's positions [B,T], if these are counted from where its first token of a step stands
    behind `past` rows; see `layer_budgets`."""
    if positions.target is not A.sub.Tensor:
        return None
    given = arguments(positions)
    source, moved = given["self"], given["other"]
    if given["alpha"] != 1 or getattr(moved, "target", None) is not A.unsqueeze.default:
        return None
    distance = moved.args[0]
    if moved.args[1] not in (1, -1) or getattr(distance, "target", None) is not A.sub.Tensor:
        return None
    of = arguments(distance)
    first = of["self"]
    picked = getattr(first, "target", None) is A.select.int and tuple(first.args) == (source, 1, 0)
    return source if picked and of["other"] is past and of["alpha"] == 1 else None


def _count(x: torch.fx.Node) -> int:
    """Heads."""
    return int(str(type_of(x).dims[1]))


def _repeated(x: torch.fx.Node) -> tuple[torch.fx.Node, int]:
    """(y, n) of rows that are y's, each head n times; (x, 1) of others."""
    wide: Any = x.args[0] if x.target in (A.reshape.default, A.view.default) else None
    apart: Any = wide.args[0] if getattr(wide, "target", None) is A.expand.default else None
    if getattr(apart, "target", None) is not A.unsqueeze.default:
        return x, 1
    source: torch.fx.Node = apart.args[0]
    batch, heads, *rest = type_of(source).dims
    each = type_of(wide).dims[2]
    if list(type_of(apart).dims) != [batch, heads, 1, *rest] or not isinstance(each, int):
        return x, 1
    if not isinstance(heads, int) or list(type_of(x).dims) != [batch, heads * each, *rest]:
        return x, 1
    return source, each


def _sliced(x: torch.fx.Node, repeat: int) -> tuple[torch.fx.Node, int, int]:
    """(y, first, repeat) of heads of y from the first on."""
    if x.target is A.slice.Tensor:
        given = arguments(x)
        start = given["start"] or 0
        if given["dim"] == 1 and given["step"] == 1 and isinstance(start, int) and start >= 0:
            return given["self"], start, repeat
    return x, 0, repeat
