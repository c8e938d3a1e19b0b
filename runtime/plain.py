"""Plain decoding: nobody drafts, and a step takes one token of each sequence and yields one.

It yields what the loop's general step would. But a model's run pushes Python's code and data out of
the processor's caches, and whatever a step touches then takes 10 to 30 us to be fetched again: what
costs is how many different things are used, not how often. So here a step writes three numbers into
memory that is bound to the model, runs it, and reads one.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..ir import Program
from .feed import Feeder
from .sampling import bad_logits
from .stats import Stats
from .stopping import Stopping
from .streaming import Emitter
from .text import Text
from .verifiers.base import Verifier

FETCH = ("argmax",)


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
    """Decodes texts whose prompts are in the cache and whose first tokens are committed."""

    def __init__(
        self, feeder: Feeder, texts: Sequence[Text], stopping: Stopping, stats: Stats
    ) -> None:
        self.feeder, self.texts, self.stopping, self.stats = feeder, texts, stopping, stats
        self.vocabulary = feeder.executable.program.info.vocab_size

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
            made += self._steps(live, left, emitter)
        return made

    def _steps(self, live: list[int], most: int, emitter: Emitter | None) -> int:
        """Up to `most` steps, which there is room for; fewer where a text ends. How many."""
        texts, eos, vocabulary = self.texts, self.stopping.eos, self.vocabulary
        buffers = self.feeder.buffers(1)
        call = buffers.chain.fetching(self.feeder.executable, FETCH)
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
