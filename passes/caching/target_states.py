"""Let functions that draft read the target's keys and values; a part of `insert_kv_cache`.

Before (stage canonical)::

    draft func glide(..., seen: i64[B,T], target.5.key: f32[B,G,N,D], target.5.value) -> ... {
      %y = graftwork.target_attention(%q, %target.5.key, %target.5.value, %seen, scale=0.125)

After (stage cached)::

    draft func glide(..., seen: i64[B,T], kv.5.key: f32[B,G,C,D], kv.5.value, ...) -> ... {
      %m: bool[B,1,T,C] = graftwork.seen_mask(%seen, C)
      %y: f32[B,H,T,D] = graftwork.attend(%q, %kv.5.key, %kv.5.value, %m, scale=0.125)

An input that is called after a layer of the target and a part becomes the state in which the
target keeps that part of the layer. Such a function reads the state and does not write it, so rows
of committed text are what verification made of them, and ``seen`` says how many there are. Passes
that store rows in another form exchange what it reads as they do in the step. Refuses a function
of the target with such inputs, and layers whose keys and values the target does not keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.fx

from ...ir import Function, PassError, Program, Role, State, Sym, arguments, site_of
from ...ir.plan.inputs import TARGET
from .cached_rows import scored

G = torch.ops.graftwork


def bind_target_states(program: Program, functions: dict[str, Function]) -> dict[str, Function]:
    """The functions with the target's states in the place of the inputs that stand for them.

    program: with all states. functions: which write them. Errors: `PassError`.
    """
    kept = {
        str(node.target)
        for fn in functions.values()
        if fn.role is Role.TARGET
        for node in fn.inputs
    }
    held = {(s.layer, s.part): s for s in program.states.values() if s.name in kept}
    return {name: _bound(fn, held) for name, fn in functions.items()}


def _bound(fn: Function, held: Mapping[tuple[int, str], State]) -> Function:
    asked = list(_asked(fn))
    if not asked:
        return fn
    if fn.role is not Role.DRAFT:
        raise PassError(
            f"insert_kv_cache: {fn.name} does not draft, and takes {asked[0][0]}: only functions "
            f"that draft read the target's states so"
        )
    fn = fn.copy()
    for name, layer, part in asked:
        state = held.get((layer, part))
        if state is None:
            there = ", ".join(sorted(f"{a}.{b}" for a, b in held)) or "nothing"
            raise PassError(
                f"insert_kv_cache: {fn.name} reads the {part} of the target's layer {layer}, which "
                f"the target does not keep; it keeps {there}"
            )
        node = fn.input(name)
        node.target, node.meta["type"] = state.name, state.type
    _lower(fn)
    return fn


def _asked(fn: Function) -> Iterator[tuple[str, int, str]]:
    """The inputs that stand for states of the target: name, layer and part."""
    for node in fn.inputs:
        kind, _, rest = str(node.target).partition(".")
        layer, _, part = rest.partition(".")
        if kind == TARGET and layer.isdecimal() and part:
            yield str(node.target), int(layer), part


def _lower(fn: Function) -> None:
    """Attention over states in the place of `target_attention`; what sees the same rows shares a
    mask."""
    masks: dict[tuple[torch.fx.Node, int | None], torch.fx.Node] = {}
    for node in fn.calls(G.target_attention.default):
        given = arguments(node)
        key = seen, window = given["seen"], given["window"]
        with fn.graph.inserting_before(node):
            if key not in masks:
                masks[key] = fn.call(G.seen_mask.default, seen, Sym("C"), window=window)
            rows = given["q"], given["k"], given["v"], masks[key]
            attended = fn.call(G.attend.default, *rows, site=site_of(node), **scored(node))
        fn.replace(node, attended)
    fn.retype()
