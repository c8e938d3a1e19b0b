"""What drafters that are made of others have in common."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.executable import Executable
from ....ir.plan import FirstDraft, MergedDraft
from ...asking.options import GenerationOptions
from ..lengths.base import LengthPolicy
from .base import UnverifiedStep, VerifiedStep
from .grown import Composed, drafter_for


class CombiningDrafter(Composed):
    """`parts`, the drafters of the record's `of`; all of them see every step."""

    def __init__(
        self,
        record: FirstDraft | MergedDraft,
        executable: Executable,
        options: GenerationOptions,
        length: LengthPolicy,
    ) -> None:
        super().__init__(record, executable, options, length)
        self.parts = [drafter_for(part, executable, options, length) for part in record.of]
        self.wants = tuple(dict.fromkeys(name for part in self.parts for name in part.wants))
        self.reads = any(part.reads for part in self.parts)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """See `Drafter.begin`."""
        for part in self.parts:
            part.begin(prompts)

    def read(self, fed: UnverifiedStep) -> None:
        """See `Drafter.read`."""
        for part in self.parts:
            part.read(fed)

    def observe(self, taken: VerifiedStep) -> None:
        """See `Drafter.observe`."""
        for part in self.parts:
            part.observe(taken)
