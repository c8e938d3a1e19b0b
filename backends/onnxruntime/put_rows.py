"""Puts a step's rows into caches that other ops than attention's kernel read, by one kernel.

Before::

    %q: f32[B,4,T,16] = graftwork.rotary(%q0, %cos, %sin)
    %k: f32[B,2,T,16] = graftwork.rotary(%k0, %cos, %sin)
    %kw: f32[B,2,C,16] = graftwork.cache_write(%kv.0.key, %k, %past)
    %vw: f32[B,2,C,16] = graftwork.cache_write(%kv.0.value, %v, %past)
    %y: f32[B,4,T,16] = graftwork.attend_rows(%q, %kw, %vw, %rows, %m, scale=0.25)

After, with %qkv f32[B,T,128] the product that query, key and value are pieces of::

    %p: (f32[B,4,T,16], f32[B,2,C,16], f32[B,2,C,16], f32[B,2,T,16]) = graftwork.ort_put_rows(
        %qkv, None, None, %kv.0.key, %kv.0.value, %past, %positions, @cos, @sin, heads=4, groups=2)
    %y: f32[B,4,T,16] = graftwork.attend_rows(%p.0, %p.1, %p.2, %rows, %m, scale=0.25)

Caches are float32 states that nothing else reads before they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import Function, arguments, site_of, type_of
from . import ops  # noqa: F401  (defines ort_put_rows)
from .heads import Heads, heads_of
from .tables import Tables, rotation_of
from .views import packed_of

G = torch.ops.graftwork
Node = torch.fx.Node


@dataclass
class _Found:
    """Rows that one kernel can put: queries and keys as other ops read them, and all of them before
    they were turned."""

    q: Node
    k: Node
    writes: tuple[Node, Node]
    before: Heads
    tables: Tables
    positions: Node


def put_rows(
    fn: Function, flat: Callable[[Node], Node], table: Callable[[Node, torch.dtype], Node]
) -> None:
    """Edit in place (hand in a copy). flat: makes [B,T,H*D] of [B,H,T,D]. table: makes a rotary
    table that has rows for a last step that overhangs."""
    if not fn.has_input("positions"):
        return
    done: set[Node] = set()
    for write in fn.calls(G.cache_write.default):
        found = None if write in done else _found(fn, write)
        if found is not None and (first := _first_use(fn, found)) is not None:
            done.update(found.writes)
            _put(fn, found, first, flat, table)


def _found(fn: Function, write: Node) -> _Found | None:
    """What a write of turned keys belongs to."""
    k = arguments(write)["new"]
    beside = _beside(fn, write)
    if beside is None:
        return None
    value = arguments(beside)["new"]
    for q in _asking(write, k):
        before = heads_of(q, k, value)
        if before is None:
            continue
        positions = fn.input("positions")
        query, key, tables = rotation_of(before.q, before.k, positions, lambda width, half: True)
        if tables is not None and all(type_of(x).dtype == torch.float32 for x in (query, key)):
            whole = Heads(query, key, before.v, before.options)
            return _Found(q, k, (write, beside), whole, tables, positions)
    return None


def _beside(fn: Function, write: Node) -> Node | None:
    """The write of values beside one of keys: into the state that is named so."""
    state = arguments(write)["cache"]
    if not _is_alone(state) or ".key" not in str(state.target):
        return None
    place, _, rest = str(state.target).rpartition(".key")
    name = f"{place}.value{rest}"
    if not fn.has_input(name) or not _is_alone(fn.input(name)):
        return None
    other = next(iter(fn.input(name).users))
    if other.target is not G.cache_write.default or arguments(other)["cache"] is not fn.input(name):
        return None
    dims, values = (type_of(each).dims for each in (state, fn.input(name)))
    alike = dims[:3] == values[:3] and other.args[2] is write.args[2]
    return other if alike and type_of(arguments(other)["new"]).dtype == torch.float32 else None


def _is_alone(state: Any) -> bool:
    """Whether a value is a state of floats that is only written."""
    return (
        state.op == "placeholder"
        and len(state.users) == 1
        and type_of(state).dtype == torch.float32
        and next(iter(state.users)).args[0] is state
    )


def _asking(write: Node, k: Node) -> Iterator[Node]:
    """Queries that are beside a cache in some op."""
    seen = {k, write}
    for user in write.users:
        for node in user.all_input_nodes:
            rank = len(type_of(node).dims) if not isinstance(node.meta["type"], tuple) else 0
            if node not in seen and rank == 4 and node.op == "call_function":
                seen.add(node)
                yield node


def _first_use(fn: Function, found: _Found) -> Node | None:
    """Where the kernel goes: before what reads its results; None if that is before its operands."""
    order = {node: place for place, node in enumerate(fn.graph.nodes)}
    users = {user for node in (found.q, found.k, *found.writes) for user in node.users}
    first = min(users - set(found.writes), key=order.__getitem__)
    past = arguments(found.writes[0])["past"]
    needed = (found.before.q, found.before.k, found.before.v, past)
    return first if all(order[node] < order[first] for node in needed) else None


def _put(
    fn: Function,
    found: _Found,
    first: Node,
    flat: Callable[[Node], Node],
    table: Callable[[Node, torch.dtype], Node],
) -> None:
    caches = [arguments(write)["cache"] for write in found.writes]
    heads, groups = (type_of(x).dims[1] for x in (found.q, caches[0]))
    with fn.graph.inserting_before(first):
        pieces = [flat(x) for x in (found.before.q, found.before.k, found.before.v)]
        packed = packed_of(pieces)
        parts: list[Any] = [packed, None, None] if packed is not None else list(pieces)
        made = fn.call(
            G.ort_put_rows.default,
            *(*parts, *caches, arguments(found.writes[0])["past"], found.positions),
            *(table(x, torch.float32) for x in (found.tables.cos, found.tables.sin)),
            site=site_of(found.writes[0]),
            heads=heads,
            groups=groups,
            interleaved=found.tables.interleaved,
            **found.before.options,
        )
        q, key, value, k = (fn.item(made, index) for index in range(4))
    repeated = "repeat" in found.before.options
    for old, new in ((found.q, q), *zip(found.writes, (key, value), strict=True), (found.k, k)):
        if old is not found.k or not repeated:
            old.replace_all_uses_with(new)
    for write in found.writes:
        fn.graph.erase_node(write)
