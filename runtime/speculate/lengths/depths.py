"""What policies share that know how deep a draft may grow before it is begun."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....ir.execution.executable import Executable
from ....ir.plan import LengthRecord
from ..level import Level
from .base import Flags, LengthPolicy


class SequenceDepths(LengthPolicy):
    """Ends the drafts of a chain, and the growth of a tree, at each sequence's own depth.

    depths: i64[batch], for the next drafts. A subclass sets them before `limits` reads them.
    """

    def __init__(self, record: LengthRecord, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.chain = not executable.program.plan.tree.branches
        self.depths: npt.NDArray[np.int64] = np.ones(batch, dtype=np.int64)

    def limits(self, rooms: Sequence[int]) -> list[int]:
        """See `LengthPolicy.limits`. In a tree the depth is limited, not the nodes."""
        wanted = self.depths.tolist() if self.chain else [self.most] * self.batch
        return [
            min(count, self.most) if room > 0 else 0
            for count, room in zip(wanted, rooms, strict=True)
        ]

    def goes_on(self, level: Level, depth: int) -> Flags:
        flags: Flags = self.depths > depth
        return flags
