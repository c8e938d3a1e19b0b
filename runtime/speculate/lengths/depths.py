"""What policies share that know how deep a draft may grow before it is begun."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ....ir.execution.executable import Executable
from ....ir.plan import LengthRecord
from ...feeding.draft import VerifiedStep
from ..last_state import LastState
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


class AskedDepths(SequenceDepths):
    """Depths that a function says, `record.function`, of the state that each draft starts from,
    `record.output`. Of the prompt nothing is asked: the first draft is as long as it may be.

    said: the function's output.
    """

    said: ClassVar[str]

    def __init__(self, record: Any, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        self.wants = (record.output,)
        self.depths = np.full(batch, record.levels)
        self.last = LastState(record.output, batch)

    @abstractmethod
    def deep(self, said: torch.Tensor) -> npt.NDArray[np.int64]:
        """Depths i64[B] of what was said, f32[B,...]."""

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        """Ask about the state that each sequence's last token was chosen from."""
        self.last.observe(taken)
        inputs = {"hidden": self.last.get()[1]}
        found = self.executable.run(self.record.function, inputs, (self.said,))[self.said]
        self.depths = self.deep(found[:, 0].float())
