"""Predict how long the next draft should be from the target's state, before it is made.

Source: Zhang et al., "AdaEAGLE: Optimizing Speculative Decoding via Explicit Modeling of Adaptive
Draft Structures" (2024): the lightweight draft length predictor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ....ir.plan import LengthRecord, Returned, record
from ....ir.plan.bounds import Filled, Levels
from ....runtime.speculate.lengths.base import LENGTHS
from ....runtime.speculate.lengths.depths import AskedDepths

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
class PredictedPolicy(AskedDepths):
    """The nearest whole number of tokens, and one at least."""

    record: PredictedLength
    said: ClassVar[str] = "length"

    def deep(self, said: torch.Tensor) -> npt.NDArray[np.int64]:
        return said.round().clamp(1, self.record.levels).long().cpu().numpy()
