"""Sequences of a batch that go on from the texts of others: what they hold of them moves along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir import SOURCE, Program, Role
from ...ir.execution.executable import Executable
from ..asking.text import Text
from .base import CachePolicy
from .conversations import common, rows_of


def take_over(
    executable: Executable, cache: CachePolicy, texts: Sequence[Text], source: Sequence[int]
) -> None:
    """Text b becomes what text source[b] was, and so does what the states hold of it.

    A step has fed the texts' last tokens, whose rows do not count yet. Texts are written from one
    source, or have their own (see `Encoded`) in common with those that they go on from. Rows of
    what two texts begin with stay where they are, as far as another call could go on from there.
    """
    moved = [index for index, one in enumerate(source) if one != index]
    if not moved:
        return
    start, stop = [0] * len(texts), [0] * len(texts)
    for index in moved:
        text, other = texts[index], texts[source[index]]
        fed, stop[index] = len(other.tokens), other.rows + 1
        same = cache.back_to(fed, common(text.tokens, other.tokens, fed))
        start[index] = max(stop[index] - fed + same, 0)
    for symbol, names in _states(executable.program).items():
        held = executable.program.plan.cache.held.get(symbol)
        if held is None:
            executable.take_over(names, source, start, stop)
        else:
            rows = [rows_of(executable.program, names[0], count, count) for count in stop]
            executable.take_over(names, source, [0] * len(texts), rows)
    were = {one: (texts[one].tokens, texts[one].rows, texts[one].position) for one in source}
    for index in moved:
        text, (tokens, text.rows, text.position) = texts[index], were[source[index]]
        text.tokens = list(tokens)


def _states(program: Program) -> Mapping[str, list[str]]:
    """What the target and its upkeep hold of texts, by capacity."""
    functions = [f for f in program.functions.values() if f.role is not Role.DRAFT]
    read = {name for function in functions for name in program.states_of(function.name)}
    found: dict[str, list[str]] = {}
    for name, state in program.states.items():
        if name in read and not state.together and state.capacity != SOURCE:
            found.setdefault(state.capacity or "", []).append(name)
    return found
