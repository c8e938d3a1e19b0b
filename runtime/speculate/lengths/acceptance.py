"""Stop where a trained head expects a rejection.

The rule is that of SpecDec++ (Huang et al., 2024; see `draft_acceptance`). The head here looks at
the target's state that the draft starts from, once a step, and speaks of all levels at once, so
that it works with any drafter and costs one small product.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ....ir.plan import AcceptanceLength
from .base import LENGTHS
from .depths import AskedDepths


@LENGTHS.register(AcceptanceLength)
class AcceptancePolicy(AskedDepths):
    """The first level after which some token is rejected with more than the threshold's chance is
    the last one."""

    record: AcceptanceLength
    said: ClassVar[str] = "accepted"

    def deep(self, said: torch.Tensor) -> npt.NDArray[np.int64]:
        whole = said.sigmoid().cumprod(-1).cpu().numpy()
        # P(any rejected) = 1 - the chance that all so far are accepted.
        going = whole >= 1 - self.record.threshold
        depths: npt.NDArray[np.int64] = np.minimum(1 + going.sum(-1), self.record.levels)
        return depths
