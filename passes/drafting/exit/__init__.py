"""The target's first layers and a head on their state draft; verification goes on from there.

Source: Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding"
(2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import DecodePlan, LearningDraft, Returned, candidates, record
from ....ir.plan.bounds import Filled, Levels
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.shallow import LeadingProposer


@record
@dataclass(frozen=True)
class ExitDraft(LearningDraft):
    """The first layers of a step that is cut, and a head on what they make (LayerSkip).

    exit: how many layers; the step is cut after them. output: what the step returns of their state,
    [B,T,H]. function: takes it as ``hidden``; returns ``draft_logits`` [B,T,V], ``draft_tokens``,
    ``draft_scores`` [B,T,K]. Verification takes the drafted tokens up where the draft has left
    them, and runs the remaining layers only. levels: tokens drafted at most.
    """

    function: Filled[str] = "exit_head"
    output: Filled[str] = "hidden.2"
    exit: Levels = 3
    levels: Levels = 4
    trained: Filled[bool] = False
    kind: ClassVar[str] = "exit"
    grows: ClassVar[bool] = True
    narrow: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True
    always: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, candidates()

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.output,)


@PROPOSERS.register(ExitDraft)
class ExitProposer(LeadingProposer):
    """Feeds a chain token by token through the first segments of the step."""
