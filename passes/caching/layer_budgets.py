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

Where a row's position is its place (`evict_cache`, positions "cache"), it is its place among the
rows of its own layer: that layer's queries and keys are rotated for `%p`, too.

`past` counts the rows of the layers that keep most. Budgets are multiples of the block, and all
layers lose rows where a block ends: so `past` says how many rows each layer holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ...ir import Function, PassError, Program, State, Sym, TensorType, arguments, site_of, type_of
from ...ir.rewrite.cleanup import sweep
from .cached_rows import ATTENDS, CachedRows
from .rotation import Rotation

A, G = torch.ops.aten, torch.ops.graftwork


def narrowed(state: State, symbol: str) -> State:
    """The state with another capacity."""
    dims = tuple(Sym(symbol) if str(dim) == state.capacity else dim for dim in state.type.dims)
    return replace(state, type=TensorType(state.type.dtype, dims))


def with_rows_of(fn: Function, states: Collection[State]) -> None:
    """Give a function whose states these are their capacity, in place. states: as they are to be;
    those that it has, all of one capacity, or none."""
    own = [state for state in states if fn.has_input(state.name)]
    if not own:
        return
    for state in own:
        fn.input(state.name).meta["type"] = state.type
    rows = Sym(str(own[0].capacity))

    def renamed(arg: Any) -> Any:
        return rows if isinstance(arg, Sym) and str(arg) == "C" else arg

    for node in fn.calls():
        node.args = map_aggregate(node.args, renamed)
        node.kwargs = map_aggregate(node.kwargs, renamed)
    fn.retype()


def rows_before(fn: Function, budget: int, block: int) -> torch.fx.Node:
    """Rows that states with this budget hold before a step, at the top of a function: i64[B]."""
    past = fn.input("past")
    with fn.graph.inserting_before(fn.calls()[0]):
        within = fn.call(A.remainder.Scalar, past, block)
        return fn.call(A.minimum.default, past, fn.call(A.add.Scalar, within, budget))


def narrow(
    fn: Function,
    program: Program,
    states: Collection[State],
    budget: int | None,
    block: int,
    *,
    turned: bool,
) -> None:
    """Let a function keep these states' rows within a budget, in place.

    program: with the tables of rotations. states: as they are to be. budget: None: that of the
    layers that keep most, whose rows do not change; windows then look back from where the rows
    stand. turned: positions are places of rows. Errors: `PassError` where their rows are used
    otherwise.
    """
    own = [state for state in states if fn.has_input(state.name)]
    if not own:
        return
    past = fn.input("past")
    place = past if budget is None else rows_before(fn, budget, block)
    places = _places(fn, place)
    attends: dict[torch.fx.Node, None] = {}
    rotated: dict[torch.fx.Node, None] = {}
    for state in own:
        node = fn.input(state.name)
        for write in [user for user in node.users if user.op != "output"]:
            if write.target is not G.cache_write.default or write.args[2] is not past:
                raise PassError(
                    f"evict_cache: %{write.name} of {fn.name} uses {state.name} otherwise than to "
                    f"write rows at past; give all layers the same budget"
                )
            write.update_arg(2, place)
            found = dict.fromkeys(n for n in write.users if n.target in ATTENDS)
            rotated |= dict.fromkeys(
                CachedRows((write,)).new for attend in found if attend.args[1] is write
            )
            attends |= found
        node.meta["type"] = state.type
    rotated |= dict.fromkeys(arguments(attend)["q"] for attend in attends)
    if turned and budget is not None:
        _rotate(fn, program, [node for node in fn.calls() if node in rotated], places)
    masks: dict[torch.fx.Node, torch.fx.Node] = {}
    for attend in attends:
        given = arguments(attend)
        mask = given["mask"]
        assert isinstance(mask, torch.fx.Node)
        if mask not in masks:
            masks[mask] = _mask(fn, mask, place, places, own[0])
        attend.update_arg(list(given).index("mask"), masks[mask])
    fn.retype()
    sweep(fn)


def _places(fn: Function, place: torch.fx.Node) -> torch.fx.Node:
    """Where rows of a step's tokens stand if that of the first is `place`, at the top of a function
    but for that: i64[B,T]."""
    positions = fn.input("positions")
    with fn.graph.inserting_before(place.next if place.op == "call_function" else fn.calls()[0]):
        dropped = fn.call(A.sub.Tensor, fn.call(A.select.int, positions, 1, 0), place)
        return fn.call(A.sub.Tensor, positions, fn.call(A.unsqueeze.default, dropped, 1))


def _rotate(
    fn: Function, program: Program, rotated: Collection[torch.fx.Node], places: torch.fx.Node
) -> None:
    """Rotate queries and keys, in the function's order, for these places."""
    made: dict[Rotation, list[torch.fx.Node]] = {}
    for node in rotated:
        rotation = Rotation.of(node, fn.input("positions"))
        if rotation is None:
            raise PassError(
                f"evict_cache: positions='cache' takes a row's place in its layer for its "
                f"position, and %{node.name} of {fn.name}, whose layer drops rows at other places "
                f"than others do, is not what a rotation by the tokens' own positions gives, from "
                f"tables (tabulate_positions makes them): use positions='absolute'"
            )
        with fn.graph.inserting_before(node):
            if rotation not in made:
                made[rotation] = rotation.angles(fn, program, places)
            given, inner = (node.args[0], *made[rotation]), rotation.interleaved
            again = fn.call(G.rotary.default, *given, site=site_of(node), interleaved=inner)
        fn.replace(node, again)


def _mask(
    fn: Function,
    mask: torch.fx.Node,
    place: torch.fx.Node,
    places: torch.fx.Node,
    state: State,
) -> torch.fx.Node:
    given, positions = arguments(mask), fn.input("positions")
    made = mask.target is G.step_mask.default and given["past"] is fn.input("past")
    made = made and given["positions"] is positions
    if not made or given["row_positions"] is not None or given["chunk"] is not None:
        raise PassError(
            f"evict_cache: %{mask.name} of {fn.name}: {type_of(mask)} hides rows of {state.name} "
            f"otherwise than by past; give all layers the same budget"
        )
    window = given["window"]
    with fn.graph.inserting_before(mask):
        return fn.call(
            G.step_mask.default,
            place,
            positions if window is None else places,
            given["ancestors"],
            Sym(str(state.capacity)),
            **({} if window is None else {"window": window}),
        )
