"""Edits of a program's decode plan that passes share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ir import PassError, Program
from ...ir.legality import misfit
from ...ir.plan import DraftRecord, FirstDraft, Lossless, NoDraft, Record


def with_draft(program: Program, draft: DraftRecord) -> Program:
    """The program with one drafter more: where the earlier ones have no draft, it has its turn."""
    before = program.plan.draft
    if isinstance(before, FirstDraft):
        draft = FirstDraft((*before.of, draft))
    elif not isinstance(before, NoDraft):
        draft = FirstDraft((before, draft))
    return with_plan(program, draft=draft)


def with_plan(program: Program, **slots: Any) -> Program:
    """The program with some slots of its plan replaced."""
    return program.replace(plan=replace(program.plan, **slots))


def fitting(program: Program, who: str) -> Program:
    """The program. Errors: `PassError` naming `who` if a part of its plan contradicts another."""
    if why := misfit(program.plan):
        raise PassError(f"{who}: {why}")
    return program


def with_verifier(program: Program, who: str, verify: Record) -> Program:
    """The program with another verifier. Errors: `PassError` naming `who` if one was chosen."""
    if not isinstance(program.plan.verify, Lossless):
        raise PassError(f"{who}: the plan has a verifier already: {program.plan.verify.brief}")
    return with_plan(program, verify=verify)
