"""Facts about programs, and how each is seen: what passes provide is checked, not trusted.

A fact that a program shows has a predicate here, which says why it does not hold, or "". The
manager asks it after a pass that provides the fact, before one that requires it, and for programs
that come from files. Other facts, such as "norms", say only that a pass has had its turn: a program
in which there was nothing to raise looks like one in which nobody looked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ...ir import InputError, Program
from ...ir.plan import SampledTree
from ...ir.plan.inputs import ANCESTORS, PACKED
from ...ir.rewrite.stored import stored_ops

Predicate = Callable[[Program], str]
"""Why something does not hold for a program; "" if it does."""

PREDICATES: dict[str, Predicate] = {}


def fact(name: str) -> Callable[[Predicate], Predicate]:
    """Decorator: the function says why a fact does not hold for a program, or "".

    Errors: `InputError` for a fact that has a predicate already.
    """

    def add(predicate: Predicate) -> Predicate:
        if name in PREDICATES:
            raise InputError(f"the fact {name!r} has a predicate already")
        PREDICATES[name] = predicate
        return predicate

    return add


def shown(program: Program) -> frozenset[str]:
    """The facts with a predicate that hold for a program."""
    return frozenset(name for name, predicate in PREDICATES.items() if not predicate(program))


def broken(program: Program, facts: Iterable[str]) -> str:
    """The first of the facts that does not hold, and why; "" if all do that can be seen."""
    for name in sorted(facts):
        if name in PREDICATES and (why := PREDICATES[name](program)):
            return f"{name!r}, which does not hold: {why}"
    return ""


@fact("canonical")
def _canonical(program: Program) -> str:
    return "the program's stage is traced" if program.stage == "traced" else ""


@fact("cached")
def _cached(program: Program) -> str:
    reads = any(program.step.has_input(name) for name in program.states)
    held = reads and program.step.has_input("past")
    return "" if held else _lacks(program, "past and a state")


@fact("segments")
def _segments(program: Program) -> str:
    in_parts = program.plan.step.in_parts
    return "" if in_parts else f"the plan has step={program.plan.step.brief}"


@fact("drafts")
def _drafts(program: Program) -> str:
    return "" if program.plan.speculates else "the plan has draft=none()"


@fact("unrolled")
def _unrolled(program: Program) -> str:
    draft = program.plan.draft
    unrolled = any(leaf.unrolled is not None for leaf in draft.leaves)
    return "" if unrolled else f"draft={draft.brief} makes no chain in one call"


@fact("sampled trees")
def _sampled(program: Program) -> str:
    tree = program.plan.tree
    return "" if isinstance(tree, SampledTree) else f"the plan has tree={tree.brief}"


@fact("quantized")
def _quantized(program: Program) -> str:
    some = any(fn.calls(*stored_ops()) for fn in program.functions.values())
    return "" if some else "no function has weights of a few bits"


def _lacks(program: Program, wanted: str) -> str:
    given = ", ".join(str(node.target) for node in program.step.inputs)
    return f"{program.step.name} does not take {wanted}; it takes {given}"


def _takes(program: Program, *, wanted: str) -> str:
    return "" if program.step.has_input(wanted) else _lacks(program, wanted)


def _returns(program: Program, *, wanted: str) -> str:
    step, outputs = program.step.name, program.step.outputs
    there = f"{step} does not return {wanted}; it returns {', '.join(outputs)}"
    return "" if wanted in outputs else there


fact("trees")(partial(_takes, wanted=ANCESTORS))
fact("packed")(partial(_takes, wanted=PACKED))
fact("picked")(partial(_takes, wanted="select"))
fact("argmax")(partial(_returns, wanted="argmax"))
fact("top_tokens")(partial(_returns, wanted="top_tokens"))
