"""Layers whose caches have budgets of their own.

Before::

    %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C)
    %kw: f32[B,G,C,D] = graftwork.cache_write(%kv.3.key, %k, %past)
    %y: f32[B,H,T,D] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After (budget 256 and block 64, capacity C.2)::

    %e: i64[B] = aten.remainder.Scalar(%past, 64)
    %r: i64[B] = aten.minimum(%past, aten.add.Scalar(%e, 256))
    %m2: bool[B,1,T,C.2] = graftwork.step_mask(%r, %positions, None, C.2)
    %kw: f32[B,G,C.2,D] = graftwork.cache_write(%kv.3.key, %k, %r)
    %y: f32[B,H,T,D] = graftwork.attend(%q, %kw, %vw, %m2, scale=0.125)

A layer that looks back over a window holds the latest rows. Where these stand is known from the
step's first token, and what it sees depends on distances alone::

    %d: i64[B] = aten.sub.Tensor(aten.select.int(%positions, 1, 0), %r)
    %p: i64[B,T] = aten.sub.Tensor(%positions, aten.unsqueeze(%d, 1))
    %m2: bool[B,1,T,C.2] = graftwork.step_mask(%r, %p, None, C.2, window=512)

`past` counts the rows of the layers that keep most. Budgets are multiples of the block, and all
layers lose rows where a block ends: so `past` says how many rows each layer holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.fx

from ...ir import Function, PassError, State, Sym, TensorType, arguments, type_of
from ...ir.rewrite.cleanup import sweep
from .cached_rows import ATTENDS

A, G = torch.ops.aten, torch.ops.graftwork


def narrowed(state: State, symbol: str) -> State:
    """The state with another capacity."""
    dims = tuple(Sym(symbol) if str(dim) == state.capacity else dim for dim in state.type.dims)
    return replace(state, type=TensorType(state.type.dtype, dims))


def rows_before(fn: Function, budget: int, block: int) -> torch.fx.Node:
    """Rows that states with this budget hold before a step, at the top of a function: i64[B]."""
    past = fn.input("past")
    with fn.graph.inserting_before(fn.calls()[0]):
        within = fn.call(A.remainder.Scalar, past, block)
        return fn.call(A.minimum.default, past, fn.call(A.add.Scalar, within, budget))


def narrow(fn: Function, states: Collection[State], budget: int | None, block: int) -> None:
    """Let a function keep these states' rows within a budget, in place.

    states: as they are to be. budget: None: that of the layers that keep most, whose rows do not
    change; windows then look back from where the rows stand. Errors: `PassError` where their rows
    are used otherwise.
    """
    own = [state for state in states if fn.has_input(state.name)]
    if not own:
        return
    past = fn.input("past")
    place = past if budget is None else rows_before(fn, budget, block)
    attends: dict[torch.fx.Node, None] = {}
    for state in own:
        node = fn.input(state.name)
        for write in [user for user in node.users if user.op != "output"]:
            if write.target is not G.cache_write.default or write.args[2] is not past:
                raise PassError(
                    f"evict_cache: %{write.name} of {fn.name} uses {state.name} otherwise than to "
                    f"write rows at past; give all layers the same budget"
                )
            write.update_arg(2, place)
            attends |= dict.fromkeys(n for n in write.users if n.target in ATTENDS)
        node.meta["type"] = state.type
    masks: dict[torch.fx.Node, torch.fx.Node] = {}
    for attend in attends:
        given = arguments(attend)
        mask = given["mask"]
        assert isinstance(mask, torch.fx.Node)
        if mask not in masks:
            masks[mask] = _mask(fn, mask, place, own[0])
        attend.update_arg(list(given).index("mask"), masks[mask])
    fn.retype()
    sweep(fn)


def _mask(fn: Function, mask: torch.fx.Node, place: torch.fx.Node, state: State) -> torch.fx.Node:
    given = arguments(mask)
    made = mask.target is G.step_mask.default and given["past"] is fn.input("past")
    if not made or given["row_positions"] is not None or given["chunk"] is not None:
        raise PassError(
            f"evict_cache: %{mask.name} of {fn.name}: {type_of(mask)} hides rows of {state.name} "
            f"otherwise than by past; give all layers the same budget"
        )
    positions, window = given["positions"], given["window"]
    with fn.graph.inserting_before(mask):
        if window is not None:
            first = fn.call(A.select.int, positions, 1, 0)
            dropped = fn.call(A.sub.Tensor, first, place)
            positions = fn.call(A.sub.Tensor, positions, fn.call(A.unsqueeze.default, dropped, 1))
        return fn.call(
            G.step_mask.default,
            *(place, positions, given["ancestors"], Sym(str(state.capacity))),
            **({} if window is None else {"window": window}),
        )
