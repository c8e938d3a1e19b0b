"""Edits of a program's decode plan that passes share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from ...ir import Function, InputError, PassError, Program
from ...ir.check.legality import misfit
from ...ir.plan import DraftRecord, Prefilled, Record, Whole

PREFILL = "prefill"
Prompts = Literal["same", "full"]
"""What prompts run through: the "same" function as what is generated, or the "full" one, as it was
before a pass let the step do less."""


def with_draft(program: Program, draft: DraftRecord) -> Program:
    """The program with one drafter more: where the earlier ones have no draft, it has its turn."""
    return program.replace(plan=draft.into(program.plan))


def with_plan(program: Program, **slots: Any) -> Program:
    """The program with some slots of its plan replaced."""
    return program.replace(plan=replace(program.plan, **slots))


def with_record(program: Program, who: str, record: Record) -> Program:
    """The program with a record in its plan. Errors: `PassError` naming `who` if its slot is taken,
    or if a part of the plan contradicts another."""
    try:
        plan = record.into(program.plan)
    except InputError as error:
        raise PassError(f"{who}: {error}") from error
    return fitting(program.replace(plan=plan), who)


def fitting(program: Program, who: str) -> Program:
    """The program. Errors: `PassError` naming `who` if a part of its plan contradicts another."""
    if why := misfit(program.plan):
        raise PassError(f"{who}: {why}")
    return program


def with_prefill(program: Program, who: str) -> Program:
    """The program whose prompts run through a function of their own: a copy of the step as it is,
    unless there is one. Errors: `PassError` naming `who` for a step of more than one function."""
    plan, step = program.plan, program.step
    if isinstance(plan.step, Prefilled):
        return program
    if plan.step != Whole(step.name) or PREFILL in program.functions:
        raise PassError(
            f"{who}: prefill='full' needs a plan whose step is the function {step.name!r} alone, "
            f"and no function {PREFILL!r}; the plan has step={plan.step.brief}: set prefill='same'"
        )
    whole = Function(PREFILL, step.copy().graph, step.role)
    return with_plan(program, step=Prefilled(step.name, PREFILL)).with_function(whole)
