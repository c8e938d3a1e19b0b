"""Drafts of several requests, made together.

Each request's drafter is its own and makes its draft in a coroutine of its own. One that calls a
draft function waits there until all others do, too, or are done; of calls that are alike, those of
neighbouring sequences become one of a batch. So the function's weights are read once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from greenlet import getcurrent, greenlet

from ...ir.execution.executable import Executable
from ..feeding.draft import NO_DRAFT, Draft
from ..speculate.draft_cache import HELD, DraftCache, DraftCall
from .slot import Slot

Made = dict[str, torch.Tensor]


class Asked(NamedTuple):
    """A call that a draft waits for."""

    cache: DraftCache
    call: DraftCall

    @property
    def kind(self) -> object:
        """What calls have in common that can be made as one; prompts are read one by one."""
        if self.call.tokens.shape[1] > HELD:
            return id(self.call)
        same = self.call.silent, self.call.absent, self.call.select.shape[1]
        return self.cache.function, self.cache.ahead, *same


class Drafting(greenlet):
    """The draft of a slot, while it is made. asked: what it waits for; None: it is done."""

    def __init__(self, slot: Slot, make: Callable[[Slot], Draft]) -> None:
        super().__init__(make)
        self.slot, self.decoding = slot, slot.decoding
        self.left, self.draft = perf_counter(), NO_DRAFT
        self.asked = self._went_on(self.switch(slot))

    def go_on(self, answer: Made | Exception, share: float) -> None:
        """Let it go on, to its next call or its end. answer: what its call returned or raised.
        share: seconds of that call which count as its own; of the others it takes none."""
        self.decoding.away += perf_counter() - self.left - share
        if isinstance(answer, Exception):
            self.asked = self._went_on(self.throw(answer))
        else:
            self.asked = self._went_on(self.switch(answer))

    def _went_on(self, told: Asked | Draft) -> Asked | None:
        self.left = perf_counter()
        if isinstance(told, Asked):
            return told
        self.draft = told
        return None


def _ask(cache: DraftCache, call: DraftCall) -> Made | None:
    """What a call returns that is made with others; None where it is not."""
    here = getcurrent()
    if not isinstance(here, Drafting):
        return None
    assert here.parent is not None
    made: Made = here.parent.switch(Asked(cache, call))
    return made


DraftCache.joined = staticmethod(_ask)


class JoinedDrafts:
    """Makes the drafts of an executable's slots. calls: that were made for several slots."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.calls = executable, 0
        # What is behind the shorter of two calls would be in a recurrence for good.
        program = executable.program
        self.joins = bool(program.plan.draft.cached) and not program.recurrent
        self.caches: dict[tuple[int, int, str, int], DraftCache] = {}

    def make(self, slots: Sequence[Slot], draft: Callable[[Slot], Draft]) -> list[Draft]:
        """The slots' drafts, each as `draft` makes it alone."""
        if sum(slot.drafts for slot in slots) < 2 or not self.joins:
            return [draft(slot) for slot in slots]
        drafting = {slot.index: Drafting(slot, draft) for slot in slots if slot.decodes}
        while waiting := [one for one in drafting.values() if one.asked is not None]:
            self._answer(self._fitting(max(self._groups(waiting), key=len)))
        made = [drafting.get(slot.index) for slot in slots]
        return [NO_DRAFT if one is None else one.draft for one in made]

    def _groups(self, waiting: Sequence[Drafting]) -> Iterator[list[Drafting]]:
        """Those whose calls can be made as one: alike, and of sequences that lie side by side."""
        group: list[Drafting] = []
        for one in waiting:
            assert one.asked is not None
            if group and not self._joins(group, one):
                yield group
                group = []
            group.append(one)
        yield group

    def _joins(self, group: Sequence[Drafting], one: Drafting) -> bool:
        last = group[-1]
        assert last.asked is not None and one.asked is not None
        beside = one.slot.index == last.slot.index + 1
        return beside and one.asked.kind == last.asked.kind

    def _fitting(self, group: list[Drafting]) -> list[Drafting]:
        """The first of a group; of what is compiled for their number there are few sizes."""
        assert group[0].asked is not None
        compiled = group[0].asked.cache.widths.each
        return group[: 1 << (len(group).bit_length() - 1)] if compiled else group

    def _answer(self, group: list[Drafting]) -> None:
        """Make the calls of a group, and let its drafts go on."""
        asked = [one.asked for one in group if one.asked is not None]
        begun = perf_counter()
        answers: Sequence[Made | Exception]
        try:
            if len(group) == 1:
                answers = [asked[0].cache.make(asked[0].call)]
            else:
                answers = self._made(group[0].slot.index, asked)
        except Exception as error:  # what failed is every draft's of the call
            answers = [error] * len(group)
        share = (perf_counter() - begun) / len(group)
        for one, answer in zip(group, answers, strict=True):
            one.go_on(answer, share)

    def _made(self, first: int, asked: Sequence[Asked]) -> list[Made]:
        """What the calls of the sequences from the first on return, made as one."""
        cache = asked[0].cache
        key = first, len(asked), cache.function, cache.ahead
        if key not in self.caches:
            part = self.executable.sequences(first, len(asked))
            self.caches[key] = DraftCache(part, cache.function, ahead=cache.ahead)
        made = self.caches[key].make(DraftCall.of([one.call for one in asked]))
        self.calls += 1
        return [{name: value[n : n + 1] for name, value in made.items()} for n in range(len(asked))]
