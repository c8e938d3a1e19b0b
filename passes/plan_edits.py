"""Edits of a program's decode plan that passes share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..ir import Program
from ..ir.plan import DraftRecord, FirstDraft, NoDraft


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
