"""Runs passes: derives order and legality from what they declare, verifies after each, reports.

What passes say of their results is checked where a program shows it (see `facts`).

Order: a pass that requires a fact runs after those that provide it; one that reads an effect runs
after those that have it; otherwise the recipe's order stands. Nothing here knows a pass by name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from ...ir import PassError, PassRecord, Program, VerifyError
from ...ir.check.legality import idle, unmet
from ...ir.check.verify import verify
from ...ir.support.threads import traces
from .base import Contract, Effect, Evidence, Outcome, Pass, all_passes
from .facts import PREDICATES, broken, shown
from .reopening import Reopened, stored_names
from .validate import Check, Validator


@dataclass(frozen=True)
class Step:
    """One pass of a recipe. optional: it may match nothing without being an error."""

    pass_: Pass
    optional: bool = False


@dataclass(frozen=True)
class PassReport:
    """What one pass did: provenance record, node counts, if validated the measured check, and its
    remarks."""

    record: PassRecord
    nodes_before: int
    nodes_after: int
    check: Check | None = None
    remarks: tuple[str, ...] = ()


def facts_of(program: Program) -> frozenset[str]:
    """Facts that hold for a program: its stage, what it shows, and of facts that no program shows
    those that passes which made it provide."""
    known = all_passes()
    provided = [known[r.name].provides for r in program.provenance if r.name in known]
    unseen = frozenset[str]().union(*provided) - PREDICATES.keys()
    return frozenset({"traced", program.stage}) | shown(program) | unseen


def weakest(contracts: Iterable[Contract]) -> Contract:
    """The contract of a composition: the weakest of its parts'."""
    return max(contracts, key=lambda c: c.rank, default=Contract.EXACT)


def arrange(steps: Sequence[Step], facts: frozenset[str] = frozenset({"traced"})) -> list[Step]:
    """The steps in a legal order, as near to the given one as the declarations allow.

    Errors: `PassError` for a requirement that nothing provides, a pass given twice, or requirements
    that form a circle; each names the passes.
    """
    _check_once(steps)
    _check_required(steps, facts)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(steps)))
    for i, before in enumerate(steps):
        for j, after in enumerate(steps):
            if i != j and _must_precede(before.pass_, after.pass_):
                graph.add_edge(i, j)
    try:
        order = list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible as error:
        cycle = [steps[i].pass_.name for i, _ in nx.find_cycle(graph)]
        raise PassError(f"passes require each other in a circle: {' -> '.join(cycle)}") from error
    return [steps[i] for i in order]


def _must_precede(before: Pass, after: Pass) -> bool:
    if before.provides & after.requires:
        return True
    affects = before.effects & after.reads
    # Two passes that both read and have an effect keep the recipe's order.
    return bool(affects) and not (after.effects & before.reads)


def _check_once(steps: Sequence[Step]) -> None:
    once = Counter(step.pass_.name for step in steps if not step.pass_.repeatable)
    if twice := [name for name, count in once.items() if count > 1]:
        raise PassError(f"pass {twice[0]!r} is given twice")


def _check_required(steps: Sequence[Step], facts: frozenset[str]) -> None:
    available = facts.union(*(step.pass_.provides for step in steps))
    for step in steps:
        missing = sorted(step.pass_.requires - available)
        if not missing:
            continue
        raise PassError(
            f"pass {step.pass_.name!r} requires {missing[0]!r}, which neither the program (it has "
            f"{', '.join(sorted(facts))}) nor another pass of the recipe provides"
            f"{_hint(missing[0])}"
        )


def _hint(fact: str) -> str:
    """Who provides a fact."""
    providers = sorted(n for n, p in all_passes().items() if fact in p.provides)
    return f"; add {' or '.join(providers)}" if providers else ""


@traces
def run_passes(
    program: Program,
    steps: Sequence[Step],
    *,
    validator: Validator | None = None,
    progress: Callable[[str], None] | None = None,
    after: str | None = None,
    evidence: Evidence | None = None,
    watch: Callable[[Program], None] = lambda program: None,
) -> tuple[Program, list[PassReport]]:
    """Run the steps in a legal order; every intermediate program is verified, and the last plan.

    after: the name of the pass to stop after, whatever the plan then lacks. evidence: for passes
    that learn from text; its progress is told under the pass's name. watch: called with the program
    before all passes, and after each. Errors: `PassError` naming the pass that refused, matched
    nothing or made an invalid program, and the pass before it; or the part of the plan that cannot
    be carried out, or never acts.
    """
    reports: list[PassReport] = []
    previous = "the frontend"
    ordered = arrange(steps, facts_of(program))
    names = [step.pass_.name for step in ordered]
    end = len(names) if after is None else len(names) - names[::-1].index(after)
    for step in ordered[:end]:
        step.pass_.check_evidence(program, evidence)  # before any of them has taken its time
    held = stored_names(program)
    watch(program)
    for step in ordered[:end]:
        if progress is not None:
            progress(step.pass_.name)
        opened = step.pass_.reopen(program, held)
        held, before = held - opened.claimed, stored_names(opened.program)
        program, report = _run_one(program, opened, step, previous, validator, evidence)
        if Effect.WEIGHT_NUMERICS not in step.pass_.effects:  # merged or moved, not stored anew
            held |= stored_names(program) - before
        reports.append(report)
        watch(program)
        previous = step.pass_.name
    if after is None:
        check_plan(program)
    return program, reports


def check_plan(program: Program) -> None:
    """That every part of a finished program's plan has what it needs, and something to do.

    Errors: `PassError` naming the part, and the pass to add or to leave out; `UnsupportedError` for
    a part that no decode loop carries out.
    """
    if fault := unmet(program):
        raise PassError(f"{fault[0]}{_hint(fault[1])}")
    if nothing := idle(program.plan):
        raise PassError(f"{nothing}; leave it out")


def _run_one(
    program: Program,
    opened: Reopened,
    step: Step,
    previous: str,
    validator: Validator | None,
    evidence: Evidence | None,
) -> tuple[Program, PassReport]:
    pass_, start = step.pass_, time.perf_counter()
    if lacking := broken(program, pass_.requires):
        raise PassError(f"pass {pass_.name!r} (after {previous!r}) requires {lacking}")
    try:
        outcome = pass_.apply(opened.program, evidence)
    except VerifyError as error:
        raise PassError(f"pass {pass_.name!r} (after {previous!r}) failed: {error}") from error
    if opened.claimed and (opened.kept or outcome.matches):
        remarks, matches = (*opened.remarks, *outcome.remarks), opened.kept + outcome.matches
        outcome = replace(outcome, matches=matches, remarks=remarks)
    if outcome.matches == 0 and not step.optional:
        near = f"; nearest miss: {outcome.near_miss}" if outcome.near_miss else ""
        raise PassError(
            f"pass {pass_.name!r} matched nothing in {program.name!r}{near}. Leave it out, or mark "
            f"it 'optional: true' in the recipe if that is expected"
        )
    result = _finish(program, outcome, pass_, previous, start)
    if outcome.matches and (lacking := broken(result, pass_.provides)):
        raise PassError(f"pass {pass_.name!r} (after {previous!r}) provides {lacking}")
    check = None
    if validator is not None and outcome.matches:
        check = validator.compare(program, result, pass_.name, pass_.contract)
    before, after = _count(program), _count(result)
    return result, PassReport(result.provenance[-1], before, after, check, outcome.remarks)


def _finish(
    program: Program, outcome: Outcome, pass_: Pass, previous: str, start: float
) -> Program:
    options = tuple(sorted(pass_.model_dump().items()))
    seconds = time.perf_counter() - start
    record = PassRecord(pass_.name, options, pass_.contract.value, outcome.matches, seconds)
    result = outcome.program.replace(provenance=(*program.provenance, record)).pruned()
    try:
        verify(result)
    except VerifyError as error:
        raise PassError(
            f"pass {pass_.name!r} (after {previous!r}) produced an invalid program: {error}"
        ) from error
    seconds = time.perf_counter() - start
    return result.replace(provenance=(*program.provenance, replace(record, seconds=seconds)))


def _count(program: Program) -> int:
    return sum(len(fn.calls()) for fn in program.functions.values())
