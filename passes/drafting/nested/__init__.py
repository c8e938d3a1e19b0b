"""A draft model of nested depths: each token takes as few of its layers as are sure of it.

Source: Kavehzadeh et al., "S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested
Large Language Models" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....ir import InputError
from ....ir.plan import DecodePlan, LearningDraft, Returned, candidates, record
from ....ir.plan.bounds import Context, Filled, Levels, Share
from ....runtime.speculate.draft_cache import DraftCache
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.hidden import level_of
from ....runtime.speculate.proposers.kept import KeepingProposer, KeptSequence, places_of
from ....runtime.speculate.setting import Setting


@record
@dataclass(frozen=True)
class NestedDraft(LearningDraft):
    """Another model whose first layers, and some more, and all, are models of their own (S2D).

    functions: its parts, in order; the first takes ``tokens`` [B,T], each takes up `state` where
    the one before has left it. head: takes ``past``, ``select`` [B,S] and `state`; returns
    ``draft_logits`` [B,S,V], ``draft_tokens``, ``draft_scores`` [B,S,K], at any depth. exits:
    layers up to the end of each part but the last. threshold: a prediction whose best token is as
    probable as this is the draft's; else the next part goes on, up to the last one, which decides.
    levels: tokens predicted ahead at most. context: positions that the model has; None: as many as
    the target. trained: whether the weights know anything.
    """

    functions: Filled[tuple[str, ...]] = ("draft.0", "draft.1")
    head: Filled[str] = "draft.head"
    state: Filled[str] = "draft.stream"
    exits: Filled[tuple[int, ...]] = (1,)
    threshold: Share = 0.8
    levels: Levels = 5
    context: Filled[Context | None] = None
    trained: Filled[bool] = False
    kind: ClassVar[str] = "nested"
    grows: ClassVar[bool] = True
    narrow: ClassVar[bool] = True

    def check(self) -> None:
        if not 1 < len(self.functions) == len(self.exits) + 1:
            raise InputError(
                f"nested: expected an exit behind each function but the last, got functions="
                f"{self.functions} and exits={self.exits}"
            )

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        for function in self.functions:
            yield function, {self.state: ("", 1, "", "")}
        yield self.head, candidates()

    @property
    def cached(self) -> tuple[str, ...]:
        return self.functions

    @property
    def always(self) -> bool:
        """Unless a text outgrows its context."""
        return self.context is None


@PROPOSERS.register(NestedDraft)
class NestedProposer(KeepingProposer):
    """The rows that a token lacks in later parts are made with those of the next one that goes as
    deep, in one call."""

    record: NestedDraft

    def __init__(self, record: NestedDraft, setting: Setting) -> None:
        super().__init__(record, setting, record.functions)
        self.head = DraftCache(self.executable, record.head)

    def sequence(self, prompt: Sequence[int]) -> KeptSequence:
        return KeptSequence(prompt, len(self.record.functions))

    def bring_up(self, usual: int) -> bool:
        late = super().bring_up(usual)
        if not any(s.alive and s.rows[0] - s.rows[-1] > usual for s in self.sequences):
            return late
        # A part goes as far as the first: what fills its rows up must lie behind all of theirs.
        for part in range(1, len(self.caches)):
            self._catch_up([sequence.rows[0] for sequence in self.sequences], 0, part)
        return True

    def ask(self, asking: Sequence[bool]) -> None:
        """Run part after part, until each is sure of what follows."""
        for part in range(len(self.caches)):
            self._deepen(part, asking)
            asking = [asks and s.alive for asks, s in zip(asking, self.sequences, strict=True)]
            asking = self._decide(part, asking)
            if not any(asking):
                return

    def _deepen(self, part: int, asking: Sequence[bool]) -> None:
        """Make the rows that those who ask lack in a part, up to the path's end."""
        ends = [s.size if asks else 0 for s, asks in zip(self.sequences, asking, strict=True)]
        self._catch_up(ends, 0, part)

    def _decide(self, part: int, asking: Sequence[bool]) -> list[bool]:
        """Ask the head of those who ask; which of them are not sure."""
        last = part == len(self.caches) - 1
        past = [s.size - 1 if asks else 0 for s, asks in zip(self.sequences, asking, strict=True)]
        places = np.array(past, dtype=np.int64)[:, None]
        nothing = np.zeros_like(places)
        words = self.executable.program.info.vocab_size
        made = level_of(self.head.run(nothing, places, past, nothing), words)
        asks_on = []
        for index, (sequence, asks) in enumerate(zip(self.sequences, asking, strict=True)):
            sure = last or float(np.exp(made.scores[index, 0, 0])) >= self.record.threshold
            if asks and sure:
                sequence.ready = places_of(made, index)
            asks_on.append(asks and not sure)
        return asks_on
