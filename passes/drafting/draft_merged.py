"""Verify the drafts of several drafters together, as one tree.

Before::

    decode {
      draft = first(of=(suffix(tokens=10, longest=16, shortest=2), suffix(...)))

After (nodes=64)::

    decode {
      draft = merged(of=(suffix(tokens=10, longest=16, shortest=2), suffix(...)), nodes=64)

Drafters that were put into the plan one after the other have their turn where the earlier ones have
no draft; merged, they all draft every step, and what they agree on is verified once. Needs a step
that takes trees (pass accept_trees). Matches nothing in a plan with fewer than two drafters.
"""

from __future__ import annotations

from ...ir import Program
from ...ir.plan import MergedDraft
from ..engine.base import Outcome
from ..engine.plan_edits import with_plan
from ..policies import RecordPass, builds


@builds(MergedDraft)
class DraftMerged(RecordPass):
    """See the record."""

    def run(self, program: Program) -> Outcome:
        draft = program.plan.draft
        if not draft.in_turn:
            return Outcome(program, 0, f"no drafters one after the other: draft={draft.kind}")
        return Outcome(with_plan(program, draft=self.made(of=draft.parts)), 1)
