"""Let functions that draft read the target's keys and values; a part of `insert_kv_cache`.

Before (stage canonical)::

    draft func glide(..., seen: i64[B,T], target.5.key: f32[B,G,N,D], target.5.value) -> ... {
      %y = graftwork.target_attention(%q, %target.5.key, %target.5.value, %seen, scale=0.125)

After (stage cached)::

    draft func glide(..., seen: i64[B,T], kv.5.key: f32[B,G,C,D], kv.5.value, ...) -> ... {
      %m: bool[B,1,T,C] = graftwork.seen_mask(%seen, C)
      %y: f32[B,H,T,D] = graftwork.attend(%q, %kv.5.key, %kv.5.value, %m, scale=0.125)

A function that drafts may also make rows that others read, one for each token that it is fed: what
it returns under a name such as ``mixture.memory.0.key`` becomes a state of that name, which it
writes, and which others take under the same name as they take the target's.

An input that is called after a layer of the target and a part becomes the state in which the
target keeps that part of the layer. Such a function reads the state and does not write it, so rows
of committed text are what verification made of them, and ``seen`` says how many there are. Passes
that store rows in another form exchange what it reads as they do in the step. Refuses a function
of the target with such inputs, and layers whose keys and values the target does not keep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
import torch.fx

from ...ir import (
    Function,
    PassError,
    Program,
    Role,
    State,
    Sym,
    TensorType,
    arguments,
    site_of,
    type_of,
)
from ...ir.plan.inputs import INPUTS, TARGET
from .cached_rows import scored

G = torch.ops.graftwork

MEMORY = re.compile(r"\w+\.memory\.([0-9]+)\.(\w+)")
"""Names of rows that a function makes for others: a layer's number and a part."""


def bind_target_states(program: Program) -> Program:
    """The program with states in the place of the inputs of functions that stand for them. Errors:
    `PassError`."""
    functions = dict(program.functions)
    made = {state.name: state for fn in functions.values() for state in _made(fn)}
    kept = {
        str(node.target)
        for fn in functions.values()
        if fn.role is Role.TARGET
        for node in fn.inputs
    }
    held = {(s.layer, s.part): s for s in program.states.values() if s.name in kept}
    bound = {name: _bound(fn, held, made) for name, fn in functions.items()}
    return program.replace(functions=bound, states={**program.states, **made})


def _made(fn: Function) -> Iterator[State]:
    """States for the rows that a function makes for others."""
    for name, node in fn.outputs.items() if fn.role is Role.DRAFT else ():
        if found := MEMORY.fullmatch(name):
            batch, groups, _, width = type_of(node).dims
            type = TensorType(type_of(node).dtype, (batch, groups, Sym("C"), width))
            yield State(name, type, int(found[1]), found[2])


def _bound(
    fn: Function, held: Mapping[tuple[int, str], State], made: Mapping[str, State]
) -> Function:
    asked = list(_asked(fn))
    if not asked and not any(name in fn.outputs or fn.has_input(name) for name in made):
        return fn
    if asked and fn.role is not Role.DRAFT:
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
    for name, state in made.items():
        if name in fn.outputs:
            _write(fn, state)
        elif fn.has_input(name):
            fn.input(name).meta["type"] = state.type
    _lower(fn)
    return fn


def _write(fn: Function, state: State) -> None:
    """Let a function write the rows that it returns."""
    past, cache = fn.taking("past", INPUTS["past"].type), fn.add_input(state.name, state.type)
    rows = fn.outputs[state.name]
    with fn.graph.inserting_before(fn.output_node):
        written = fn.call(G.cache_write.default, cache, rows, past, site=site_of(rows))
    fn.set_outputs({**fn.outputs, state.name: written})


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
