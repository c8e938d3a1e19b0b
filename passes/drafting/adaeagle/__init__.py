"""Predict how long the next draft should be from the target's state, before it is made.

Source: Zhang et al., "AdaEAGLE: Optimizing Speculative Decoding via Explicit Modeling of Adaptive
Draft Structures" (2024): the lightweight draft length predictor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ....ir.execution.executable import Executable
from ....ir.plan import LengthRecord, Returned, record
from ....ir.plan.bounds import Filled, Levels
from ....runtime.feeding.draft import VerifiedStep
from ....runtime.speculate.last_state import LastState
from ....runtime.speculate.lengths.base import LENGTHS
from ....runtime.speculate.lengths.depths import SequenceDepths

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from ....ir.plan import DecodePlan


@record
class PredictedLength(LengthRecord):
    """Drafts as long as a predictor says that the target will accept; whatever drafts.

    function: takes ``hidden`` [B,T,2H] and returns ``length`` [B,T], tokens of a draft that the
    target accepts. output: the step's output that it takes: the embedding of the text's last token
    but one, and the target's state that the last one was chosen from. levels: tokens at most.
    trained: whether it knows anything.
    """

    function: Filled[str] = "length"
    output: Filled[str] = "hidden.embedded"
    levels: Levels = 8
    trained: Filled[bool] = False
    kind: ClassVar[str] = "predicted"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical", "drafts"})

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, {"length": ("", "")}


@LENGTHS.register(PredictedLength)
class PredictedPolicy(SequenceDepths):
    """The nearest whole number of tokens, and one at least. Of the prompt nothing is asked: the
    first draft is as long as it may be."""

    record: PredictedLength

    def __init__(self, record: PredictedLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.wants = (record.output,)
        self.depths = np.full(batch, record.levels)
        self.last = LastState(record.output, batch)

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        """Ask the predictor about the state that each sequence's last token was chosen from."""
        self.last.observe(taken)
        inputs = {"hidden": self.last.get()[1]}
        lengths = self.executable.run(self.record.function, inputs, ("length",))["length"]
        whole = lengths[:, 0].float().round().clamp(1, self.record.levels)
        self.depths = whole.long().cpu().numpy()
