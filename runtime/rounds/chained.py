"""Steps with chains that the drafter makes sequence by sequence; for the rest see `plain`."""

from __future__ import annotations

from time import perf_counter

from ...ir.plan import FixedLength
from ..speculate.drafters.base import ChainDrafter
from ..speculate.sampling import agreed
from .base import Decoding, Round


class ChainedRound(Round):
    """Drafts are chains that the drafter makes one by one and the argmax decides on.

    wide, narrow: columns of a step with chains and of one without.
    """

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding)
        assert isinstance(decoding.drafter, ChainDrafter)
        self.drafter, self.levels = decoding.drafter, decoding.drafter.levels
        self.fetch = ("argmax", *self.drafter.wants)
        self.wide = decoding.feeder.width(self.levels + 1, 0)
        self.narrow = decoding.feeder.width(1, 0)

    @classmethod
    def fits(cls, decoding: Decoding) -> bool:
        """Where the executable takes a whole chain and the argmax alone decides on it."""
        drafter, length = decoding.drafter, decoding.length
        if not isinstance(drafter, ChainDrafter) or not drafter.levels:
            return False
        # A verifier that looks at more than the argmax takes what the argmax does not.
        decided = decoding.argmax_decides and decoding.verifier.fetch == ("argmax",)
        whole = isinstance(length.record, FixedLength) and length.most >= drafter.levels
        return decided and whole and decoding.feeder.width(drafter.levels + 1, 0) > drafter.levels

    def wants(self) -> int | None:
        room = self.decoding.room()
        return None if room is None else room // (self.levels + 1)

    def run(self, most: int | None) -> int:
        live, room = self.decoding.live, self.decoding.make_room(self.levels + 1, self.wide)
        new: list[list[int]] = [[] for _ in self.decoding.texts]
        steps = self._steps(new, live, self.least(most, room))
        self.commit(new, live)
        return steps

    def _steps(self, new: list[list[int]], live: list[int], most: int) -> int:
        """Up to `most` steps, until a text may end; their tokens go to `new`. How many."""
        decoding, drafter, feeder = self.decoding, self.drafter, self.decoding.feeder
        texts, eos = decoding.texts, decoding.stopping.eos
        vocabulary = decoding.program.info.vocab_size
        buffers = feeder.buffers(self.wide), feeder.buffers(self.narrow)
        wide, narrow = (b.chain.fetching(feeder.executable, self.fetch) for b in buffers)
        made = drafter.wants[0] if drafter.wants else "argmax"
        chains: list[list[int]] = [
            [] if text.done else drafter.chain(index, text.room) for index, text in enumerate(texts)
        ]
        rows = [[] if text.done else [text.tokens[-1], *chains[b]] for b, text in enumerate(texts)]
        past = [0 if text.done else text.rows for text in texts]
        starts = [0 if text.done else text.position for text in texts]
        rooms = [text.limit - len(text.tokens) for text in texts]
        steps, seconds, ended = 0, 0.0, False
        feeder.log(self.wide - 1)
        while steps < most and not ended:
            memory, call = (buffers[0], wide) if any(chains) else (buffers[1], narrow)
            memory.fill(rows, past)
            memory.chains(starts)
            start = perf_counter()
            outputs = call()
            seconds += perf_counter() - start
            steps += 1
            said = outputs.integers("argmax")
            more = said if made == "argmax" else outputs.integers(made)
            for index in live:
                chain, row = chains[index], said[index]
                count = agreed(chain, row, vocabulary)
                decoding.stats.verified(len(chain), count)
                count += 1
                gained = row[:count]
                new[index] += gained
                past[index] += count
                starts[index] += count
                room = rooms[index] = rooms[index] - count
                if room <= 0 or not eos.isdisjoint(gained):
                    ended = True
                drafter.learn(index, gained, more[index])
                chain = chains[index] = drafter.chain(index, room - 1) if room > 1 else []
                rows[index] = [gained[-1], *chain]
        feeder.seconds += seconds
        decoding.stats.count(steps, len(live))
        return steps
