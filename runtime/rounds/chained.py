"""Decoding with chains: each sequence's next chain is known as soon as its text has grown.

It yields what the loop's general step would, which takes over where the context has no room for a
whole chain. As in plain decoding, what costs is how many different things a step touches: here a
step writes a few lists into memory that is bound to the model, runs it, reads what it says, and
asks the drafter, sequence by sequence, how to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TypeGuard

from ...ir.plan import FixedLength
from ..asking.stopping import Stopping
from ..asking.streaming import Emitter
from ..asking.text import Text
from ..feeding.feed import Feeder
from ..speculate.drafters.base import ChainDrafter, Drafter
from ..speculate.lengths.base import LengthPolicy
from ..speculate.sampling import bad_logits
from ..speculate.verifiers.base import Verifier
from ..stats import Stats


def is_chained(
    drafter: Drafter,
    feeder: Feeder,
    verifier: Verifier,
    length: LengthPolicy,
    stopping: Stopping,
) -> TypeGuard[ChainDrafter]:
    """Whether drafts are chains that the drafter makes one by one and the argmax decides on, and
    the executable takes them whole."""
    if not isinstance(drafter, ChainDrafter) or not drafter.levels:
        return False
    # A verifier that looks at more than the argmax takes what the argmax does not.
    decided = verifier.takes_argmax and verifier.fetch == ("argmax",)
    simple = decided and stopping.simple and isinstance(length.record, FixedLength)
    wide = feeder.width(drafter.levels + 1, feeder.context)
    return simple and length.most >= drafter.levels and wide is not None and wide > drafter.levels


class ChainedDecoding:
    """Decodes texts whose prompts are in the cache and whose first tokens are committed.

    wide, narrow: columns of a step with chains and of one without.
    """

    def __init__(
        self,
        feeder: Feeder,
        texts: Sequence[Text],
        stopping: Stopping,
        stats: Stats,
        drafter: ChainDrafter,
    ) -> None:
        self.feeder, self.texts, self.stopping, self.stats = feeder, texts, stopping, stats
        self.drafter, self.levels = drafter, drafter.levels
        self.vocabulary = feeder.executable.program.info.vocab_size
        self.fetch = ("argmax", *drafter.wants)
        self.wide = feeder.width(self.levels + 1, feeder.context) or 0
        self.narrow = feeder.width(1, feeder.context) or 0

    def run(self, emitter: Emitter | None) -> None:
        """Decode until every text is done, or the context has no room for a chain. Errors:
        `InputError` for logits that are NaN."""
        feeder = self.feeder
        while live := [index for index, text in enumerate(self.texts) if not text.done]:
            rows = max(len(self.texts[index].tokens) for index in live) - 1 + self.wide
            if rows > feeder.context:
                return
            feeder.make_room(rows)
            left = min(feeder.executable.capacity - feeder.spare, feeder.context) - rows
            self._steps(live, 1 + max(left, 0) // (self.levels + 1), emitter)

    def _steps(self, live: list[int], most: int, emitter: Emitter | None) -> None:
        """Up to `most` steps, which there is room for; fewer where a text ends."""
        texts, eos, drafter, feeder = self.texts, self.stopping.eos, self.drafter, self.feeder
        buffers = feeder.buffers(self.wide), feeder.buffers(self.narrow)
        wide, narrow = (b.chain.fetching(feeder.executable, self.fetch) for b in buffers)
        made = drafter.wants[0] if drafter.wants else "argmax"
        chains: list[list[int]] = [
            [] if text.done else drafter.chain(index, text.room) for index, text in enumerate(texts)
        ]
        rows = [[] if text.done else [text.tokens[-1], *chains[b]] for b, text in enumerate(texts)]
        past = [0 if text.done else len(text.tokens) - 1 for text in texts]
        commits: list[list[int]] = [[] for _ in texts]
        steps, seconds, drafted, accepted, ended = 0, 0.0, 0, 0, False
        while steps < most and not ended:
            memory, call = (buffers[0], wide) if any(chains) else (buffers[1], narrow)
            memory.fill(rows, past)
            memory.chains(past)
            start = perf_counter()
            outputs = call()
            seconds += perf_counter() - start
            steps += 1
            said = outputs.integers("argmax")
            more = said if made == "argmax" else outputs.integers(made)
            for index in live:
                text, chain, row = texts[index], chains[index], said[index]
                count = 0
                for token in chain:
                    if token != row[count]:
                        break
                    count += 1
                if not 0 <= row[count] < self.vocabulary:
                    raise bad_logits()
                # What agrees with the row is the row.
                new = row[: count + 1]
                if not eos.isdisjoint(new):
                    end = next(place for place, token in enumerate(new) if token in eos)
                    new, text.done = new[: end + 1], True
                text.tokens += new
                commits[index] = new
                drafted += len(chain)
                accepted += min(count, len(new))
                past[index] += len(new)
                text.done = text.done or len(text.tokens) >= text.limit
                ended = ended or text.done
                drafter.learn(index, new, more[index])
                chain = chains[index] = drafter.chain(index, text.room)
                rows[index] = [new[-1], *chain]
            if emitter is not None:
                emitter.push(texts, commits)
        feeder.seconds += seconds
        stats = self.stats
        stats.steps += steps
        stats.sequence_steps += steps * len(live)
        stats.draft_tokens += drafted
        stats.accepted_tokens += accepted
