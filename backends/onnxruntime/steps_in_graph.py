"""A program's functions put into graphs, and what is decided there between two of them.

What a plan leaves to a run stands in an If: whether this is the prompt, whether a token leaves at
an exit, whether a segment's layers fit the budget. Both branches give the same values by name; a
weight that both use lies in the graph around them (see `graph_builder.splice`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import onnx_ir as oir

from ...ir import Function, Program
from ..target import Target
from .emit import emit, output_name
from .graph_builder import GraphBuilder, splice
from .lower import has_states, lower
from .portable import concatenated
from .routing import Router

Values = dict[str, oir.Value]
Part = Callable[[GraphBuilder, Values], Values]
"""Puts something into a graph: takes values by name, returns those that it has made."""


class Functions:
    """A program's functions, each lowered once and put into graphs as often as wanted.

    contrib: with ONNX Runtime's own ops, too. concatenates: caches have no spare rows, and a step
    returns them longer (see `portable.concatenated`).
    """

    def __init__(self, program: Program, contrib: bool, concatenates: bool) -> None:
        self.program, self.contrib, self.concatenates = program, contrib, concatenates
        self.lowered: dict[str, Program] = {}
        self.routers: dict[str, Router] = {}

    def router(self, name: str) -> Router:
        """See `routing`."""
        if name not in self.routers:
            function = self.program.function(name)
            self.routers[name] = Router(self.program, function, Target(), native=False)
        return self.routers[name]

    def of(self, name: str) -> Function:
        """A function as it is put into graphs."""
        if name not in self.lowered:
            self.lowered[name] = self._lower(name)
        return self.lowered[name].function(name)

    def _lower(self, name: str) -> Program:
        if self.concatenates:
            return concatenated(self.program, name, self.contrib)
        chain = "chain" in self.router(name).counted or not has_states(self.program.function(name))
        return lower(self.program, name, "chain" if chain else "batch")

    def call(self, g: GraphBuilder, name: str, given: Mapping[str, oir.Value]) -> Values:
        """Put a function into a graph; its outputs, states under their own names."""
        fn = self.of(name)
        weights, paired = self.lowered[name].weights, self.router(name).pairs
        emitted = emit(fn, weights, paired=paired, standard=True, contrib=self.contrib)
        outputs = splice(g, emitted, given)
        return {own: outputs[output_name(fn, own)] for own in fn.outputs}

    def rounds(self, names: Collection[str]) -> bool:
        """Whether what one of them makes depends on last bits, see `routing`."""
        return any(self.router(name).rounds for name in names)

    def twice(self, names: Collection[str]) -> bool:
        """Whether they must be fed a lone token twice, see `routing`."""
        routers = [self.router(name) for name in names]
        return any(router.rounds and not router.pairs for router in routers)


@dataclass(frozen=True)
class Fed:
    """What a step is fed, besides states.

    given: inputs of functions by name, and what follows from them. first: bool[], whether it is the
    prompt. lone: bool[], whether it is one token behind that. place: i64[], tokens between the
    prompt and the first that it is fed. most: i64[], tokens that there may be behind the prompt.
    """

    given: Mapping[str, oir.Value]
    first: oir.Value
    lone: oir.Value
    place: oir.Value
    most: oir.Value


@dataclass(frozen=True)
class Steps:
    """The steps of a program's plan. wanted: outputs of theirs that are looked at."""

    functions: Functions
    wanted: frozenset[str]

    @property
    def program(self) -> Program:
        """The program."""
        return self.functions.program

    def call(self, name: str, given: Mapping[str, oir.Value]) -> Part:
        """A function on what is given and the states, of whose outputs the wanted ones are kept."""

        def part(g: GraphBuilder, values: Values) -> Values:
            outputs = self.functions.call(g, name, {**values, **given})
            kept = self.wanted | self.program.states.keys()
            return {name: value for name, value in outputs.items() if name in kept}

        return part


def nothing(g: GraphBuilder, values: Values) -> Values:
    """Leaves all values as they are."""
    return {}


def either(
    g: GraphBuilder, condition: oir.Value, yes: Part, no: Part, values: Values, called: str
) -> Values:
    """All values after one of two parts ran: `yes` where bool[] `condition` holds."""
    branches = [(g.branch(f"{called}.{said}"), part) for said, part in (("yes", yes), ("no", no))]
    made = [part(branch, dict(values)) for branch, part in branches]
    names = list(dict.fromkeys(name for new in made for name in new))
    for (branch, _), new in zip(branches, made, strict=True):
        for name in names:
            value = {**values, **new}[name]
            assert value.dtype is not None
            branch.output(name, value, value.dtype, None)
    graphs = [branch.graph for branch, _ in branches]
    results = g.op(
        "If",
        condition,
        outputs=len(names),
        called=called,
        then_branch=graphs[0],
        else_branch=graphs[1],
    )
    for value, output in zip(results, graphs[0].outputs, strict=True):
        value.dtype = output.dtype
    return {**values, **dict(zip(names, results, strict=True))}
