"""Let the target draft for itself, where another model reads along.

Before::

    decode {
      step = accompanied(...)

After (levels=3)::

    decode {
      step = accompanied(...)
      draft = own(levels=3)

The functions stay as they are. Refuses a target with recurrences, which cannot go back to where a
draft began, and what its record refuses: a step that no other model accompanies.
"""

from __future__ import annotations

from ....ir import PassError, Program
from ...engine.base import Outcome
from ...policies import PolicyPass, builds
from . import OwnDraft


@builds(OwnDraft)
class DraftOwn(PolicyPass):
    """See the record."""

    def run(self, program: Program) -> Outcome:
        if program.recurrent:
            raise PassError(
                f"{self.name}: {program.name} has recurrences, which cannot go back to where a "
                f"draft of their own began: leave this pass out, so that each token is read as it "
                f"is written, or let copies draft (draft_suffix)"
            )
        return super().run(program)
