"""Decoding with a step that verifies and drafts: a step is fed what the one before returned.

It yields what the loop's general step would, which takes over where a text has less room than a
draft. As in plain decoding, what costs is how many different things a step touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TypeGuard

from ..ir.plan import FixedLength
from .draft import Draft
from .drafters.base import Drafter
from .drafters.fused import FusedDrafter
from .feed import Feeder
from .lengths.base import LengthPolicy
from .sampling import bad_logits
from .stats import Stats
from .stopping import Stopping
from .streaming import Emitter
from .text import Text
from .verifiers.base import Verifier

FETCH = ("argmax", "drafted")


def drafts_itself(
    drafter: Drafter,
    feeder: Feeder,
    verifier: Verifier,
    length: LengthPolicy,
    stopping: Stopping,
) -> TypeGuard[FusedDrafter]:
    """Whether nothing but the step drafts and decides, and the executable has its width."""
    if not isinstance(drafter, FusedDrafter) or drafter.apart is not None:
        return False
    width = drafter.record.levels + 1
    simple = verifier.takes_argmax and stopping.simple and isinstance(length.record, FixedLength)
    return simple and length.most == width - 1 and feeder.width(width, feeder.context) == width


class ChainedDecoding:
    """Decodes texts whose prompts are in the cache and whose first tokens are committed."""

    def __init__(
        self,
        feeder: Feeder,
        texts: Sequence[Text],
        stopping: Stopping,
        stats: Stats,
        drafter: FusedDrafter,
    ) -> None:
        self.feeder, self.texts, self.stopping, self.stats = feeder, texts, stopping, stats
        self.drafter, self.levels = drafter, drafter.record.levels
        self.vocabulary = feeder.executable.program.info.vocab_size

    def run(self, emitter: Emitter | None) -> None:
        """Decode until a text is done or nearly full. Errors: `InputError` for logits that are
        NaN."""
        chains = [list(draft.tokens) for draft in self.drafter.chains]
        # Without a chain any tokens will do: they are verified like others.
        chains = [chain or [0] * self.levels for chain in chains]
        while all(text.done or text.room >= self.levels for text in self.texts):
            live = [index for index, text in enumerate(self.texts) if not text.done]
            if not live:
                return
            rows = max(len(self.texts[index].tokens) for index in live) + self.levels
            self.feeder.make_room(rows)
            left = self.feeder.executable.capacity - self.feeder.spare - rows
            self._steps(live, chains, 1 + max(left, 0) // (self.levels + 1), emitter)
        self.drafter.chains = [Draft(chain) for chain in chains]

    def _steps(
        self, live: list[int], chains: list[list[int]], most: int, emitter: Emitter | None
    ) -> None:
        """Up to `most` steps, which there is room for; fewer where a text ends or gets full."""
        texts, eos, levels, stats = self.texts, self.stopping.eos, self.levels, self.stats
        buffers = self.feeder.buffers(levels + 1)
        call = buffers.chain.fetching(self.feeder.executable, FETCH)
        rows = [[] if text.done else [text.tokens[-1], *chains[b]] for b, text in enumerate(texts)]
        past = [0 if text.done else len(text.tokens) - 1 for text in texts]
        commits: list[list[int]] = [[] for _ in texts]
        steps, seconds, accepted, ended = 0, 0.0, 0, False
        while steps < most and not ended:
            buffers.fill(rows, past)
            buffers.chains(past)
            start = perf_counter()
            outputs = call()
            seconds += perf_counter() - start
            steps += 1
            said, drafted = outputs.integers("argmax"), outputs.integers("drafted")
            for index in live:
                text, chain, row = texts[index], chains[index], said[index]
                count = 0
                while count < levels and chain[count] == row[count]:
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
                accepted += min(count, len(new))
                chain = chains[index] = drafted[index][1:]
                rows[index] = [new[-1], *chain]
                past[index] += len(new)
                text.done = text.done or len(text.tokens) >= text.limit
                ended = ended or text.done or text.room < levels
            if emitter is not None:
                emitter.push(texts, commits)
        self.feeder.seconds += seconds
        stats.steps += steps
        stats.sequence_steps += steps * len(live)
        stats.draft_tokens += steps * len(live) * levels
        stats.accepted_tokens += accepted
