"""Plain decoding: nobody drafts, and a step takes one token of each sequence and yields one.

It yields what the loop's general step would. But a model's run pushes Python's code and data out of
the processor's caches, and whatever a step touches then takes 10 to 30 us to be fetched again: what
costs is how many different things are used, not how often. So here a step writes three numbers into
memory that is bound to the model, runs it, and reads one.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from ...ir import Program
from ..asking.stopping import Stopping
from ..asking.streaming import Emitter
from ..asking.text import Text
from ..feeding.feed import Feeder
from ..feeding.gather import piece
from ..feeding.outputs import Outputs
from ..speculate.draft import Draft
from ..speculate.drafters.base import Drafter, Fed, Taken
from ..speculate.sampling import bad_logits
from ..speculate.verifiers.base import Verifier
from ..stats import Stats

FETCH = ("argmax",)

MISSED = 64
"""Steps of which a drafter is told at once, at most: what it wants of them is kept so long."""


def is_plain(program: Program, feeder: Feeder, verifier: Verifier, stopping: Stopping) -> bool:
    """Whether all steps of a generation are plain: nothing is ever drafted."""
    return program.plan.columns == 0 and may_be_plain(feeder, verifier, stopping)


def may_be_plain(feeder: Feeder, verifier: Verifier, stopping: Stopping) -> bool:
    """Whether steps without drafts are plain.

    The step's argmax is the choice, an end shows in the last token, and the executable has steps of
    one token.
    """
    return verifier.takes_argmax and stopping.simple and feeder.width(1, 1) == 1


class PlainDecoding:
    """Decodes texts whose prompts are in the cache and whose first tokens are committed.

    drafter: one that rests meanwhile. It is told of the steps afterwards, some at a time: each
    would else touch what only a draft needs.
    """

    def __init__(
        self,
        feeder: Feeder,
        texts: Sequence[Text],
        stopping: Stopping,
        stats: Stats,
        drafter: Drafter | None = None,
    ) -> None:
        self.feeder, self.texts, self.stopping, self.stats = feeder, texts, stopping, stats
        self.vocabulary = feeder.executable.program.info.vocab_size
        self.missed = None if drafter is None else _Missed(drafter)
        self.fetch: tuple[str, ...] = FETCH
        if drafter is not None:
            self.fetch = tuple(dict.fromkeys((*FETCH, *drafter.wants)))

    def run(self, emitter: Emitter | None, most: int | None = None) -> int:
        """Decode until every text is done, or `most` steps; the steps that were made. Errors:
        `InputError` for logits that are NaN."""
        made = 0
        while live := [index for index, text in enumerate(self.texts) if not text.done]:
            if made == most:
                break
            rows = max(len(self.texts[index].tokens) for index in live)
            self.feeder.make_room(rows)
            fitting = self.feeder.executable.capacity - rows + 1
            left = fitting if most is None else min(fitting, most - made)
            if self.missed is None:
                made += self._steps(live, left, emitter)
            else:
                starts = [0 if text.done else len(text.tokens) for text in self.texts]
                steps = self._steps(live, min(left, MISSED), emitter)
                self.missed.tell(self.texts, starts, steps)
                made += steps
        return made

    def _steps(self, live: list[int], most: int, emitter: Emitter | None) -> int:
        """Up to `most` steps, which there is room for; fewer where a text ends. How many."""
        texts, eos, vocabulary = self.texts, self.stopping.eos, self.vocabulary
        buffers = self.feeder.buffers(1)
        call = buffers.chain.fetching(self.feeder.executable, self.fetch)
        fed, positions, past = buffers.tokens, buffers.positions, buffers.past
        # What finished sequences are fed goes to their first rows, which nobody reads any more.
        for index, text in enumerate(texts):
            fed[index] = text.tokens[-1]
            positions[index] = past[index] = 0 if text.done else len(text.tokens) - 1
        growing = [(index, texts[index].tokens, texts[index].limit) for index in live]
        steps, seconds, ended = 0, 0.0, False
        while steps < most and not ended:
            start = perf_counter()
            outputs = call()
            seconds += perf_counter() - start
            if self.missed is not None:
                self.missed.note(steps, outputs)
            steps += 1
            chosen = outputs.integers("argmax")
            for index, tokens, limit in growing:
                token = chosen[index][0]
                if not 0 <= token < vocabulary:
                    raise bad_logits()
                tokens.append(token)
                fed[index] = token
                past[index] += 1
                positions[index] += 1
                if token in eos or len(tokens) >= limit:
                    texts[index].done = ended = True
            if emitter is not None:
                emitter.push(texts, [t.tokens[-1:] for t in texts])
        self.feeder.seconds += seconds
        self.stats.steps += steps
        self.stats.sequence_steps += steps * len(live)
        return steps


class _Missed:
    """What a drafter wants of steps that it has not seen.

    kept: by name, [MISSED,B,1,...], what each step returned. copies: of each, its memory, that of
    the outputs `seen` last, and the length of a step's part.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.kept: dict[str, torch.Tensor] = {}
        self.seen: Outputs | None = None
        self.copies: list[tuple[Any, Any, int]] = []

    def note(self, step: int, outputs: Outputs) -> None:
        """A step's outputs, which do not outlive it."""
        if outputs is not self.seen:
            self.copies = [self._copy(name, outputs[name]) for name in self.drafter.wants]
            self.seen = outputs
        for kept, value, size in self.copies:
            kept[step * size : (step + 1) * size] = value

    def _copy(self, name: str, value: torch.Tensor) -> tuple[Any, Any, int]:
        if name not in self.kept:
            self.kept[name] = value.new_empty((MISSED, *value.shape))
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
        past = [max(start - 1, 0) for start in starts]
        outputs = {name: rows[:steps, :, 0].transpose(0, 1) for name, rows in self.kept.items()}
        if self.drafter.reads:
            fed = [
                text.tokens[n - 1 : n + steps - 1] if n else []
                for text, n in zip(texts, starts, strict=True)
            ]
            self.drafter.read(Fed(fed, past, outputs))
        self.drafter.observe(Taken(drafts, paths, gained, past, [0] * len(texts), outputs))
