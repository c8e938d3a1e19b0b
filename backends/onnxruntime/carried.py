"""What a step leaves to the next inside a loop: states, and numbers of a depth policy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as oir

from ...ir import LOG, Program
from .emit import DTYPES
from .graph_builder import I64, GraphBuilder
from .steps_in_graph import Values


class Carried:
    """states: names of those that steps change. numbers: what they begin with, by name. grows:
    whether caches may begin empty."""

    def __init__(
        self, program: Program, states: list[str], numbers: Mapping[str, int], grows: bool
    ) -> None:
        self.states = {name: program.states[name] for name in states}
        self.numbers, self.grows = numbers, grows
        self.log = max(program.plan.columns, 1)

    def start(self, g: GraphBuilder, batch: oir.Value, rows: oir.Value) -> list[Any]:
        """What there is before anything was fed. rows: room for so many, where caches do not
        grow."""
        sizes = {LOG: g.const(self.log)}
        room = g.const(0) if self.grows else rows
        made = []
        for name, state in self.states.items():
            with g.within(name):
                made.append(g.zeros(state.type, {"B": batch, str(state.capacity): room, **sizes}))
        return [*made, *map(g.const, self.numbers.values())]

    def inputs(self, body: GraphBuilder) -> Values:
        """The body's inputs; a state's rows may be others every time."""
        found = {}
        for name, state in self.states.items():
            dims: list[int | str] = [
                f"{name}.rows"
                if str(dim) == state.capacity
                else dim
                if isinstance(dim, int)
                else str(dim)
                for dim in state.type.dims
            ]
            found[name] = body.input(name, DTYPES[state.type.dtype], dims)
        return found | {name: body.input(name, I64, []) for name in self.numbers}

    def outputs(self, body: GraphBuilder, values: Values) -> None:
        """The body's outputs for what `inputs` takes up."""
        for name, state in self.states.items():
            body.output(f"{name}_next", values[name], DTYPES[state.type.dtype], None)
        for name in self.numbers:
            body.output(f"{name}_next", values[name], I64, [])

    def cut(self, g: GraphBuilder, values: Values, rows: oir.Value) -> Values:
        """The first rows of caches."""
        found = {}
        for name, state in self.states.items():
            if state.grows:
                axis = [str(dim) for dim in state.type.dims].index(str(state.capacity))
                with g.within(name):
                    found[name] = g.slice(values[name], None, rows, axis)
        return found
