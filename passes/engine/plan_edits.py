"""Edits of a program's decode plan that passes share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ir import InputError, PassError, Program
from ...ir.check.legality import misfit
from ...ir.plan import DraftRecord, Record


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
