"""What functions are fed where a pass runs them on text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.fx

from ...ir import LOG, SOURCE, Function, Program, run, type_of
from ...ir.plan import Encoded
from ...ir.plan.inputs import chain_inputs, mixed_into
from ...ir.rewrite.cleanup import sweep

SOURCE_ROWS = 24
"""Rows of the source that texts are written from in the interpreter, at most."""


def encoded(program: Program, batch: int) -> dict[str, torch.Tensor]:
    """What a program's steps take that follows from a source, of sources that are the same every
    time and differ in length; nothing where there is none."""
    plan = program.plan.source
    if not isinstance(plan, Encoded):
        return {}
    fn, random = program.function(plan.function), torch.Generator().manual_seed(0)
    rows = plan.most if fn.has_input("features") else min(SOURCE_ROWS, plan.most)
    lengths = torch.tensor([max(rows - 5 * index, 1) for index in range(batch)])
    given = {"lengths": lengths}
    if fn.has_input("features"):
        wanted = type_of(fn.input("features")).bind({"B": batch})
        given["features"] = torch.randn(wanted.shape, generator=random).to(wanted.dtype)
    else:
        given["tokens"] = torch.randint(plan.vocabulary, (batch, rows), generator=random)
        given["positions"] = torch.arange(rows).repeat(batch, 1)
    for name in program.states_of(plan.function):
        kind = program.states[name].type.bind({"B": batch, SOURCE: rows})
        given[name] = torch.zeros(kind.shape, dtype=kind.dtype)
    wanted_inputs = {str(node.target) for node in fn.inputs}
    made = run(program, fn.name, {n: t for n, t in given.items() if n in wanted_inputs})
    return {**made, "lengths": lengths}


def watched(
    program: Program,
    step: Function,
    values: Mapping[str, torch.fx.Node],
    windows: torch.Tensor,
) -> Iterator[dict[str, torch.Tensor]]:
    """What values of the step are, by name, on each of some texts i64[N,T] that states know nothing
    of. Nothing else is computed or written: states may have no rows for so long a text.

    step: the program's, or a copy of it that a pass edits.
    """
    fn = step.copy()
    copies = dict(zip(step, fn, strict=True))
    fn.set_outputs({name: copies[node] for name, node in values.items()})
    sweep(fn)
    changed = program.with_function(fn)
    for window in windows:
        yield run(changed, fn.name, empty_inputs(changed, fn.name, window[None]))


def empty_inputs(program: Program, function: str, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a function is fed with texts i64[B,T] and empty states."""
    rows = {
        str(state.capacity): tokens.shape[1] for state in program.states.values() if state.grows
    }
    sizes = {"B": len(tokens), "C": tokens.shape[1], LOG: 1, **rows}
    given, inputs = chain_inputs(tokens, mixed=mixed_into(program.function(function))), {}
    for node in program.function(function).inputs:
        name = str(node.target)
        if name in program.states:
            bound = type_of(node).bind(sizes)
            inputs[name] = torch.zeros(bound.shape, dtype=bound.dtype)
        elif name in given:
            inputs[name] = given[name]
    return inputs
