"""Let caches hold rows for every head of queries, so that each may keep rows of its own.

Before::

    state kv.0.key: f32[B,2,C,D]
      %kw: f32[B,2,C,D] = graftwork.cache_write(%kv.0.key, %k, %past)
      %y: f32[B,6,T,D] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After::

    state kv.0.key: f32[B,6,C,D]
      %u: f32[B,2,1,T,D] = aten.unsqueeze(%k, 2)
      %e: f32[B,2,3,T,D] = aten.expand(%u, [B, 2, 3, T, D])
      %r: f32[B,6,T,D] = aten.reshape(%e, [B, 6, T, D])
      %kw: f32[B,6,C,D] = graftwork.cache_write(%kv.0.key, %r, %past)
      %y: f32[B,6,T,D] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

Nothing is computed otherwise, and caches take as many times the bytes as heads share keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from ...ir import Function, PassError, State, TensorType, site_of, type_of
from .cached_rows import Written

A, G = torch.ops.aten, torch.ops.graftwork


def by_query_head(
    caches: Iterable[Written], functions: Iterable[Function], states: dict[str, State]
) -> tuple[str, ...]:
    """Repeat what functions write into caches for the heads that share it, in place.

    caches: of the step, whose queries say how many heads there are. states: those of the caches
    are replaced. Returns what the user should know of it. Errors: `PassError` where a function
    uses such a state otherwise.
    """
    heads = {
        name: int(str(type_of(cache.attend.args[0]).dims[1]))  # type: ignore[arg-type]
        for cache in caches
        for name in cache.names
        if states[name].type.dims[1] != type_of(cache.attend.args[0]).dims[1]  # type: ignore[arg-type]
    }
    said = {
        f"each of {count} heads has rows of its own of keys that {states[name].type.dims[1]} heads "
        f"have, which takes {count / int(str(states[name].type.dims[1])):g} times the bytes "
        f"(heads=shared: those that share keys keep the same rows)"
        for name, count in heads.items()
    }
    for name, count in heads.items():
        type = states[name].type
        batch, _, *rest = type.dims
        states[name] = replace(states[name], type=TensorType(type.dtype, (batch, count, *rest)))
    for fn in functions:
        for name in filter(fn.has_input, heads):
            node = fn.input(name)
            for write in [user for user in node.users if user.op != "output"]:
                if write.target is not G.cache_write.default:
                    raise PassError(
                        f"%{write.name} of {fn.name} uses {name} otherwise than to write rows, and "
                        f"cannot have some for every head of queries: set heads=shared"
                    )
                with fn.graph.inserting_before(write):
                    write.update_arg(1, _repeated(fn, write.args[1], heads[name]))
            node.meta["type"] = states[name].type
        fn.retype()
    return tuple(sorted(said))


def _repeated(fn: Function, new: Any, heads: int) -> torch.fx.Node:
    """Rows [B,G,T,D], each for the heads that share them: [B,heads,T,D]."""
    batch, groups, *rest = type_of(new).dims
    apart = fn.call(A.unsqueeze.default, new, 2, site=site_of(new))
    each = heads // int(str(groups))
    wide = fn.call(A.expand.default, apart, [batch, groups, each, *rest], site=site_of(new))
    return fn.call(A.reshape.default, wide, [batch, heads, *rest], site=site_of(new))
