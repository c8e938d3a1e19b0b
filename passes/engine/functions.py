"""A pass over the functions that it serves, chosen by their roles and never by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.fx

from ...ir import Function, Program, Role, WeightStore
from ...ir.ops.quantized import LOOK_UPS
from .base import Outcome

A, G = torch.ops.aten, torch.ops.graftwork

EVERY = frozenset(Role)
TARGET = frozenset({Role.TARGET})


def edit_each(
    program: Program, edit: Callable[[Function], int | str], roles: frozenset[Role] = EVERY
) -> Outcome:
    """What comes of editing the program's functions of some roles.

    edit: changes a copy in place and says how much it did; where that was nothing, the function
    stays as it was, and text says what came nearest.
    """
    functions, total, misses = dict(program.functions), 0, list[str]()
    for name, function in program.functions.items():
        if function.role not in roles:
            continue
        fn = function.copy()
        did = edit(fn)
        if isinstance(did, str):
            misses.append(did)
        elif did:
            functions[name], total = fn, total + did
    if not total:
        return Outcome(program, 0, next(filter(None, misses), ""))
    return Outcome(program.replace(functions=functions), total)


def edit_with_weights(
    program: Program,
    edit: Callable[[Function, WeightStore], tuple[int | str, WeightStore]],
    roles: frozenset[Role] = EVERY,
) -> Outcome:
    """`edit_each` of an edit that is given the weights so far and hands on those that it needs."""
    weights = program.weights

    def edit_one(fn: Function) -> int | str:
        nonlocal weights
        did, weights = edit(fn, weights)
        return did

    outcome = edit_each(program, edit_one, roles)
    if not outcome.matches:
        return outcome
    return replace(outcome, program=outcome.program.replace(weights=weights).pruned())


def token_look_ups(fn: Function) -> list[torch.fx.Node]:
    """Where a function looks its tokens up, in a whole table or in a process's part of one; where
    some stand for trained prompts, which have a table of their own, the others are clamped."""
    if not fn.has_input("tokens"):
        return []
    tokens = fn.input("tokens")
    taken = (G.tokens_part.default, A.clamp.default)
    ids = {tokens, *(user for user in tokens.users if user.target in taken)}
    return [node for node in fn.calls(*LOOK_UPS) if not ids.isdisjoint(node.all_input_nodes)]
