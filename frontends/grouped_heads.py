"""Undo the repetition of key and value heads for grouped-query attention.

Before::

    %w: f32[B,G,R,T,D] = aten.expand(%k[B,G,1,T,D])
    %r: f32[B,G*R,T,D] = aten.reshape(%w)            ... rotary embedding of %r ...

After::

    ... the same rotary embedding of %k[B,G,T,D] ...

`graftwork.attention` takes G heads itself, so the cache that it will own holds G heads, not G*R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..ir import Function, site_of, type_of

A = torch.ops.aten

_HEAD_BY_HEAD = frozenset(
    {
        A._to_copy.default,
        A.add.Tensor,
        A.cat.default,
        A.div.Tensor,
        A.mul.Tensor,
        A.neg.default,
        A.slice.Tensor,
        A.sub.Tensor,
    }
)
"""Ops on [B,H,T,D] that treat each head alike, if they do not work along the axis of heads."""


@dataclass(frozen=True)
class _Repeated:
    """source: before the repetition, with an axis of size 1 behind that of the heads (`axis`).

    order: the permutation that followed, or None.
    """

    source: torch.fx.Node
    times: int
    axis: int
    order: list[int] | None


def repeats(x: torch.fx.Node) -> int:
    """How often each head of x [B,H,T,D] is repeated; 1 if they may all be different."""
    found = _find(x)
    if found is not None:
        return found.times
    heads = [arg for arg in x.all_input_nodes if _has_heads(arg, x)]
    if x.target not in _HEAD_BY_HEAD or _along_heads(x) or not heads:
        return 1
    times = {repeats(arg) for arg in heads}
    return times.pop() if len(times) == 1 else 1


def ungrouped(fn: Function, x: torch.fx.Node) -> torch.fx.Node:
    """x [B,G*R,T,D], where `repeats(x)` is R, computed for G heads at the insertion point."""
    return _narrowed(fn, x, {})


def _narrowed(
    fn: Function, x: torch.fx.Node, done: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    if x not in done:
        found = _find(x)
        done[x] = _again(fn, x, done) if found is None else _unrepeated(fn, x, found)
    return done[x]


def _unrepeated(fn: Function, x: torch.fx.Node, found: _Repeated) -> torch.fx.Node:
    dims = list(type_of(found.source).dims)
    del dims[found.axis + 1]
    out = fn.call(A.reshape.default, found.source, dims, site=site_of(x))
    if found.order is None:
        return out
    return fn.call(A.permute.default, out, found.order, site=site_of(x))


def _again(
    fn: Function, x: torch.fx.Node, done: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    def narrow(arg: Any) -> Any:
        wide = isinstance(arg, torch.fx.Node) and _has_heads(arg, x)
        return _narrowed(fn, arg, done) if wide else arg

    args: Any = map_aggregate(x.args, narrow)
    kwargs: Any = map_aggregate(x.kwargs, narrow)
    target: Any = x.target
    return fn.call(target, *args, site=site_of(x), **kwargs)


def _has_heads(arg: torch.fx.Node, x: torch.fx.Node) -> bool:
    """Whether an argument has the heads of x, and does not broadcast over them."""
    dims = type_of(arg).dims
    return len(dims) == 4 and dims[1] == type_of(x).dims[1]


def _along_heads(x: torch.fx.Node) -> bool:
    """Whether an op with an axis argument works along the heads."""
    return x.target in (A.cat.default, A.slice.Tensor) and x.args[1] in (0, 1)


def _find(x: torch.fx.Node) -> _Repeated | None:
    """See through reshape(expand(x[:, :, None])), and a permutation behind it."""
    order: list[int] | None = None
    if x.target is A.permute.default:
        permuted: Any = x.args
        x, order = permuted[0], list(permuted[1])
    wide = x.args[0] if x.target is A.reshape.default else None
    if not isinstance(wide, torch.fx.Node) or wide.target is not A.expand.default:
        return None
    narrow: Any = wide.args[0]
    before, after = type_of(narrow).dims, type_of(wide).dims
    if len(before) != 5 or len(after) != 5:
        return None
    changed = [axis for axis in range(5) if before[axis] != after[axis]]
    if len(changed) != 1 or before[changed[0]] != 1 or changed[0] == 0:
        return None
    repeats: Any = after[changed[0]]
    axis, times = changed[0] - 1, int(repeats)
    merged = [*after[:axis], after[axis] * times, *after[axis + 2 :]]
    if axis != (order[1] if order else 1) or merged != list(type_of(x).dims):
        return None
    return _Repeated(narrow, times, axis, order)
