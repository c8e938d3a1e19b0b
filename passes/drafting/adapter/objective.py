"""A layer that stands in for the target's others: it learns what they say of the first's states.

Sources: Liu et al., "EESD" (2024), cross entropy on text that the target wrote; Liu et al.,
"Kangaroo" (2024), the target's distribution.
"""

from __future__ import annotations

from ....training.objectives.base import objective
from ..exit.objective import window_loss
from . import AdaptedExitDraft

objective(AdaptedExitDraft)(window_loss)
