"""Plain steps: nothing is drafted; a step takes and yields one token of each sequence.

The result is the general step's. After a model's run whatever Python touches costs 10 to 30 us to
be fetched into the processor's caches again. So a step writes three numbers into memory that is
bound to the model, runs it, and reads one.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from ..asking.checks import bad_logits
from ..asking.text import Text
from ..feeding.draft import Draft, UnverifiedStep, VerifiedStep
from ..feeding.gather import piece
from ..feeding.outputs import Outputs
from ..speculate.drafters.base import Drafter
from .base import MANY, Decoding, Round

FETCH = ("argmax",)

MISSED = 64
"""Steps of which a drafter is told at once, at most: what it wants of them is kept so long."""

REST = 4
"""Steps without drafts from which on plain steps are worth changing to."""


class MissedSteps:
    """Outputs of up to `most` plain steps, kept for a drafter.

    kept: by name, [most,B,1,...], what each step returned. copies: of each, its memory, that of the
    outputs `seen` last, and the length of a step's part.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        self.drafter, self.most = drafter, most
        self.kept: dict[str, torch.Tensor] = {}
        self.seen: Outputs | None = None
        self.copies: list[tuple[Any, Any, int]] = []

    def note(self, step: int, outputs: Outputs) -> None:
        """A step's outputs, which do not outlive it."""
        if outputs is not self.seen:
            self.copies = [self._copy(name, outputs[name]) for name in self.drafter.rests]
            self.seen = outputs
        for kept, value, size in self.copies:
            kept[step * size : (step + 1) * size] = value

    def _copy(self, name: str, value: torch.Tensor) -> tuple[Any, Any, int]:
        if name not in self.kept:
            self.kept[name] = value.new_empty((self.most, *value.shape))
        rows, size = piece(self.kept[name])
        row, length = piece(value[None])
        # Outputs that do not lie in one piece of memory are copied as tensors.
        return (rows, row, size) if size == length else (self.kept[name], value[None], 1)

    def tell(self, texts: Sequence[Text], starts: Sequence[int], steps: int) -> None:
        """Catch up on `steps` steps, before which texts had `starts` tokens, finished ones 0.

        To the drafter they look like one, of a chain that was accepted whole: it cannot know who
        drafts beside it, and hears what it would have learned step by step.
        """
        gained = [
            text.tokens[n : n + steps] if n else [] for text, n in zip(texts, starts, strict=True)
        ]
        drafts = [Draft(new[:-1]) for new in gained]
        paths = [range(len(draft.tokens)) for draft in drafts]
        outputs = {name: rows[:steps, :, 0].transpose(0, 1) for name, rows in self.kept.items()}
        if self.drafter.reads:
            fed = [
                text.tokens[n - 1 : n + steps - 1] if n else []
                for text, n in zip(texts, starts, strict=True)
            ]
            begun = [max(start - 1, 0) for start in starts]
            self.drafter.read(UnverifiedStep(fed, begun, outputs))
        self.drafter.observe(VerifiedStep(drafts, paths, gained, [0] * len(texts), outputs))


class PlainRound(Round):
    """All steps of a generation for which nothing is ever drafted.

    missed: keeps what a drafter must be told of the steps, if there is one.
    """

    fetch: tuple[str, ...] = FETCH
    missed: MissedSteps | None = None

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding)
        step, executable = decoding.program.plan.step, decoding.feeder.executable
        # What the parts hand on is wanted of the last tokens alone: a step that is whole leaves
        # nothing out that a later one needs.
        whole = step.in_parts and (not executable.packs or len(step.parts) > MANY)
        apart = decoding.resting is not decoding.feeder
        self.parts = (step.plain,) if whole or apart else ()

    @classmethod
    def fits(cls, decoding: Decoding) -> bool:
        """Where the step's argmax is the choice and there are steps of one token."""
        return decoding.program.plan.columns == 0 and one_by_one(decoding)

    def run(self, most: int | None) -> int:
        decoding, feeder = self.decoding, self.decoding.feeder
        live = decoding.live
        texts = [decoding.texts[index] for index in live]
        rows = max(text.rows for text in texts) + 1
        feeder.make_room(rows)
        left = [text.limit - len(text.tokens) for text in texts]
        room = self.least(most, decoding.room(), feeder.executable.capacity - rows + 1, *left)
        new: list[list[int]] = [[] for _ in decoding.texts]
        steps = self._steps(new, live, room)
        self.commit(new, live)
        decoding.stats.count(steps, len(live))
        return steps

    def _steps(self, new: list[list[int]], live: list[int], most: int) -> int:
        """Up to `most` steps, until a text may end; their tokens go to `new`. How many."""
        decoding, texts = self.decoding, self.decoding.texts
        eos, vocabulary = decoding.stopping.eos, decoding.program.info.vocab_size
        memory = decoding.feeder.buffers(1, self.parts)
        call = memory.chain.fetching(decoding.feeder.executable, self.fetch)
        fed, positions, past = memory.tokens, memory.positions, memory.past
        # Finished sequences are fed into their first rows, which are not read any more.
        for index, text in enumerate(texts):
            fed[index] = text.tokens[-1]
            positions[index] = 0 if text.done else text.position
            past[index] = 0 if text.done else text.rows
            if memory.certain is not None:
                memory.certain[index] = 1
        growing = [(index, new[index]) for index in live]
        steps, seconds, ended = 0, 0.0, False
        while steps < most and not ended:
            start = perf_counter()
            outputs = call()
            seconds += perf_counter() - start
            if self.missed is not None:
                self.missed.note(steps, outputs)
            steps += 1
            chosen = outputs.integers("argmax")
            for index, tokens in growing:
                token = chosen[index][0]
                if not 0 <= token < vocabulary:
                    raise bad_logits()
                tokens.append(token)
                fed[index] = token
                past[index] += 1
                positions[index] += 1
                ended = ended or token in eos
        decoding.feeder.seconds += seconds
        return steps


class RestingRound(PlainRound):
    """Steps for which the length policy wants no drafts; the drafter is told of them in batches."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding)
        self.fetch = tuple(dict.fromkeys((*FETCH, *decoding.drafter.rests)))
        self.missed: MissedSteps = MissedSteps(decoding.drafter, MISSED)

    @classmethod
    def fits(cls, decoding: Decoding) -> bool:
        """Where the length policy may want none, and a step without a draft is a plain one."""
        return decoding.length.record.gives_up and one_by_one(decoding)

    def wants(self) -> int:
        steps = self.decoding.length.rest()
        return steps if steps >= REST else 0

    def run(self, most: int | None) -> int:
        texts, wanted, made = self.decoding.texts, self.wants() if most is None else most, 0
        live, before = len(self.decoding.live), self.decoding.clock()
        while made < wanted and len(self.decoding.live) == live > 0:
            starts = [0 if text.done else len(text.tokens) for text in texts]
            room = self.decoding.room()
            steps = super().run(min(MISSED, wanted - made))
            self.missed.tell(texts, starts, steps)
            made += steps
            if steps == room:
                break  # the cache policy must have its turn
        self.decoding.length.rested(made, self.decoding.clock() - before)
        return made


def one_by_one(decoding: Decoding) -> bool:
    """Whether a step without drafts takes and yields one token of each text, by its argmax."""
    return decoding.argmax_decides and decoding.resting.width(1, 0) == 1
