"""Which executables requests can share, and how."""

from __future__ import annotations

from dataclasses import replace

from ...ir import Program, UnsupportedError
from ...ir.execution.executable import Executable, Planned
from ...ir.plan import Fused, FusedDraft, Whole
from ..cache.base import CACHES
from ..loop import settled


def shareable(executable: Executable) -> Executable:
    """`apart`. Errors: `UnsupportedError` for a plan whose steps requests cannot share."""
    executable = apart(executable)
    if fault := not_shared(executable.program):
        raise UnsupportedError(fault)
    return executable


def apart(executable: Executable) -> Executable:
    """The executable without what a step does for the drafts of texts that all take part in it:
    each request's are made for it alone."""
    executable = settled(executable)
    plan = executable.program.plan
    if isinstance(plan.step, Fused) and isinstance(plan.draft, FusedDraft):
        step, draft = Whole(plan.step.plain), plan.draft.draft
        return Planned(executable, replace(plan, step=step, draft=draft))
    return executable


def not_shared(program: Program) -> str | None:
    """Why requests cannot share the steps of a program; None if they can."""
    plan = program.plan
    cache = CACHES.find(plan.cache)
    for fault, why in (
        (plan.source.encoder, "its texts are written from sources"),
        (plan.depth.stops, f"depth={plan.depth.kind}: how deep a step goes depends on its tokens"),
        (len(plan.step.variants) > 1, f"step={plan.step.kind}: prompts run through other layers"),
        (cache.shares, f"cache={plan.cache.kind}: rows are held once for texts that begin alike"),
        (getattr(plan.cache, "least", None), f"cache={plan.cache.kind}: edited prompts"),
    ):
        if fault:
            return (
                f"{program.name} cannot be served with this recipe: {why}, which requests that "
                f"come and go cannot share; take another recipe"
            )
    return None
