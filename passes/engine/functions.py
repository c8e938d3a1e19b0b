"""A pass over the functions that it serves, chosen by their roles and never by their names."""

from __future__ import annotations

from collections.abc import Callable

from ...ir import Function, Program, Role

EVERY = frozenset(Role)
TARGET = frozenset({Role.TARGET})


def edit_each(
    program: Program, edit: Callable[[Function], int], roles: frozenset[Role] = EVERY
) -> tuple[Program, int]:
    """The program with its functions of some roles edited, and how much there was to do.

    edit: changes a copy in place and says how much it did; where that is nothing the function stays
    as it was.
    """
    functions, total = dict(program.functions), 0
    for name, function in program.functions.items():
        if function.role not in roles:
            continue
        fn = function.copy()
        count = edit(fn)
        if count:
            functions[name], total = fn, total + count
    return program.replace(functions=functions), total
