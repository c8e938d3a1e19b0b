"""States in the place of others that hold the same rows otherwise, and who reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from ...ir import Function, PassError, Program, Role, State, TensorType, arguments, type_of

G = torch.ops.graftwork

Parts = tuple[torch.fx.Node, ...]
"""What stands for a state, or for what is written into it: a node for each of the new states."""


def state_of(rows: Any) -> str:
    """The name of the state that rows are of, written or not; "" if they are of none."""
    while isinstance(rows, torch.fx.Node) and rows.target is G.cache_write.default:
        rows = rows.args[0]
    held = isinstance(rows, torch.fx.Node) and rows.op == "placeholder"
    return str(rows.target) if held else ""


def cached_states(program: Program) -> set[str]:
    """Names of the states whose rows attention of the target reads."""
    targets = [fn for fn in program.functions.values() if fn.role is Role.TARGET]
    attends = [node for fn in targets for node in fn.calls(G.attend.default)]
    found = {state_of(rows) for node in attends for rows in node.args[1:3]}
    return found & program.states.keys()


def beside(state: State, part: str, type: TensorType) -> State:
    """A state for a part of what another one holds."""
    return State(f"{state.name}.{part}", type, state.layer, f"{state.part}_{part}")


def exchanged(states: Mapping[str, State], made: Mapping[str, Sequence[State]]) -> dict[str, State]:
    """States by name, with those that are made of some in their places."""
    every = (new for name, state in states.items() for new in made.get(name, (state,)))
    return {state.name: state for state in every}


def exchange(
    who: str,
    function: Function,
    made: Mapping[str, Sequence[State]],
    write: Callable[[Function, torch.fx.Node, Parts], Parts],
    attend: Callable[[Function, torch.fx.Node, Parts, Parts], torch.fx.Node],
) -> Function:
    """A function whose attention reads other states: those of `made`, by the name of the old one.

    write: what stands for a call of `cache_write`, given what stands for its cache; inputs that are
    not written stay what they are. attend: what
    stands for a call of `attend`, given keys and values. Errors: `PassError` naming the pass `who`
    if something else reads the old states.
    """
    own = [str(node.target) for node in function.inputs if str(node.target) in made]
    if not own:
        return function
    fn, parts = function.copy(), dict[torch.fx.Node, Parts]()
    for name in own:
        parts[fn.input(name)] = tuple(fn.add_input(new.name, new.type) for new in made[name])
    for node in fn.calls(G.cache_write.default, G.attend.default):
        given = arguments(node)
        with fn.graph.inserting_before(node):
            if node.target is G.attend.default and given["k"] in parts:
                if given["v"] not in parts:
                    raise PassError(f"{who}: {fn.name} attends to keys of a cache and other values")
                new = attend(fn, node, parts[given["k"]], parts[given["v"]])
                node.replace_all_uses_with(new)
            elif node.target is G.cache_write.default and given["cache"] in parts:
                parts[node] = write(fn, node, parts[given["cache"]])
    outputs: dict[str, torch.fx.Node] = {}
    for name, value in fn.outputs.items():
        if name not in own:
            outputs[name] = value
            continue
        for state, part in zip(made[name], parts[value], strict=True):
            if part.op != "placeholder":
                outputs[state.name] = part
    fn.set_outputs(outputs)
    for node in reversed(list(fn)):
        if node in parts or (node.target is G.attend.default and not node.users):
            erase(who, fn, node)
    return fn


def erase(
    who: str, fn: Function, node: torch.fx.Node, only: str = "attention can read stored rows"
) -> None:
    """Take away what other states stand for. only: who may read those, and what they are. Errors:
    `PassError` naming the pass `who` if something else reads it."""
    if node.users:
        reader = next(iter(node.users))
        raise PassError(
            f"{who}: %{reader.name} of {fn.name} ({reader.target}) reads "
            f"{node.target if node.op == 'placeholder' else type_of(node)} as it is, and only "
            f"{only}: leave out the pass that needs it, or this one"
        )
    fn.graph.erase_node(node)
