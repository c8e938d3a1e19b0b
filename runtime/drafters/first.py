"""Several drafters: the first that has a draft wins, sequence by sequence and step by step."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.executable import Executable
from ...ir.plan import FirstDraft
from ..lengths.base import LengthPolicy
from ..options import GenerationOptions
from .base import DRAFTERS, NO_DRAFT, Draft, Fed, Taken
from .grown import Composed, drafter_for


@DRAFTERS.register(FirstDraft)
class FirstDrafter(Composed):
    """Asks the next drafter only for the sequences that still have no draft."""

    record: FirstDraft

    def __init__(
        self,
        record: FirstDraft,
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

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        drafts = [NO_DRAFT] * len(rooms)
        for part in self.parts:
            open_ = [0 if d.tokens else room for d, room in zip(drafts, rooms, strict=True)]
            if not any(open_):
                break
            for index, draft in enumerate(part.propose(open_)):
                if draft.tokens:
                    drafts[index] = draft
        return drafts

    def read(self, fed: Fed) -> None:
        """See `Drafter.read`."""
        for part in self.parts:
            part.read(fed)

    def observe(self, taken: Taken) -> None:
        """See `Drafter.observe`."""
        for part in self.parts:
            part.observe(taken)
