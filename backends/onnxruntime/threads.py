"""How many threads each function's session runs with, and which of them stop when a run ends.

The threads of a session spin for a while after its work. Threads of another session would have to
take the cores from them: a step between steps of another kind took three times as long. So where
a program's decoding runs several functions that have threads, these stop as soon as a run ends, and
take some microseconds to wake; and what is drafted between two steps runs on one, unless it has so
much to read that all cores pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir import Function, Program, Role
from ...ir.ops.quantized import LOOK_UPS
from ..target import Target
from .session import threads_of

LARGE = 24 << 20
"""Bytes of weights from which on a draft runs on all cores: one core reads some ten of them a
millisecond, and a draft of a third as much was slower on two than on one."""


@dataclass(frozen=True)
class Threads:
    """Of the sessions of a program. counts: threads, by function. in_turn: functions whose threads
    stop with each run, as another's are next."""

    counts: Mapping[str, int]
    in_turn: frozenset[str]

    @classmethod
    def of(cls, program: Program, target: Target) -> Threads:
        """Upkeep, which moves rows, has one thread."""
        functions = program.functions
        models = {name for name, fn in functions.items() if fn.role is Role.TARGET}
        drafts = {
            name
            for name, fn in functions.items()
            if fn.role is Role.DRAFT and bytes_read(program, fn) >= LARGE
        }
        many = models | drafts
        counts = {name: threads_of(target) if name in many else 1 for name in functions}
        turns = many & _decoding(program)
        return cls(counts, frozenset(turns if len(turns) > 1 else ()))


def _decoding(program: Program) -> set[str]:
    """Functions that steps may run, one after the other."""
    plan = program.plan
    records = [*plan.draft.every, plan.depth]
    called = {name for record in records for name, _ in record.calls(plan)}
    return called | {*plan.step.variants, *plan.step.parts}


def bytes_read(program: Program, fn: Function) -> int:
    """Bytes of weights that a run reads whole: all but those that are looked up alone."""
    nodes = [node for node in fn if node.op == "get_attr"]
    names = {str(n.target) for n in nodes if any(u.target not in LOOK_UPS for u in n.users)}
    return sum(program.weights[name].type.nbytes for name in names)
