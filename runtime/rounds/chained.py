"""Steps with chains that the drafter makes sequence by sequence; for the rest see `plain`."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..feeding.calls import Call, CallInTurn
from ..feeding.step_inputs import StepInputs
from ..speculate.drafters.base import ChainDrafter
from ..speculate.ready_chains import ReadyChains
from ..speculate.sampling import agreed
from .base import Decoding, Round


class ChainedRound(Round):
    """Drafts are chains that the drafter makes one by one and the argmax decides on.

    widths: columns of a step by the tokens of the longest chain in it. ready: says how much of the
    chains is verified.
    """

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding)
        assert isinstance(decoding.drafter, ChainDrafter)
        self.drafter, self.levels = decoding.drafter, decoding.drafter.levels
        self.fetch = ("argmax", *self.drafter.wants)
        width = decoding.feeder.width
        self.widths = [width(size + 1, 0) for size in range(self.levels + 1)]
        ready = chains_of(decoding)
        assert ready is not None
        self.ready = ready

    @classmethod
    def fits(cls, decoding: Decoding) -> bool:
        """Where the executable takes a whole chain and the argmax alone decides on it."""
        drafter, length = decoding.drafter, decoding.length
        if not isinstance(drafter, ChainDrafter) or not drafter.levels:
            return False
        # A verifier that looks at more than the argmax takes what the argmax does not.
        decided = decoding.argmax_decides and decoding.verifier.fetch == ("argmax",)
        whole = chains_of(decoding) is not None and length.most >= drafter.levels
        return decided and whole and decoding.feeder.width(drafter.levels + 1, 0) > drafter.levels

    def wants(self) -> int | None:
        room = self.decoding.room()
        most = None if room is None else room // (self.levels + 1)
        # A last token needs no step that drafts.
        if self.decoding.resting is not self.decoding.feeder and not any(rooms_of(self.decoding)):
            return 0
        steps = self.ready.steps() if most != 0 else 0
        return most if steps is None or (most is not None and most < steps) else steps

    def run(self, most: int | None) -> int:
        live, room = self.decoding.live, self.decoding.make_room(self.levels + 1, self.widths[-1])
        start = self.decoding.clock()
        if self.drafter.prepare(rooms_of(self.decoding)):
            self.ready.prepared(self.decoding.clock() - start)
        new: list[list[int]] = [[] for _ in self.decoding.texts]
        steps = self._steps(new, live, self.least(most, room))
        self.commit(new, live)
        return steps

    def _steps(self, new: list[list[int]], live: list[int], most: int) -> int:
        """Up to `most` steps, until a text may end; their tokens go to `new`. How many."""
        decoding, drafter, feeder = self.decoding, self.drafter, self.decoding.feeder
        texts, eos = decoding.texts, decoding.stopping.eos
        vocabulary = decoding.program.info.vocab_size
        made = drafter.wants[0] if drafter.wants else "argmax"
        chains: list[list[int]] = [[] for _ in texts]
        past = [0 if text.done else text.rows for text in texts]
        starts = [0 if text.done else text.position for text in texts]
        rooms = [text.limit - len(text.tokens) for text in texts]
        for index in live:
            chains[index] = drafter.chain(index, texts[index].room)
        rows: list[list[int]] = [[] for _ in texts]
        last = [0 if text.done else text.tokens[-1] for text in texts]
        steps, seconds, ended = 0, 0.0, False
        feeder.log(self.widths[-1] - 1)
        while steps < most and not ended:
            evidence = [drafter.evidence(index) for index in live]
            size = self.ready.size([len(chains[index]) for index in live], evidence)
            for index in live:
                del chains[index][size:]
                rows[index] = [last[index], *chains[index]]
            fed = [len(chains[index]) for index in live]
            memory, call = self._call(self.widths[max(fed)], rows)
            memory.fill(rows, past)
            memory.chains(starts)
            start, begun = perf_counter(), decoding.clock()
            outputs = call()
            took = decoding.clock() - begun  # without what is compiled for the first such step
            seconds += perf_counter() - start
            steps += 1
            said = outputs.integers("argmax")
            more = said if made == "argmax" else outputs.integers(made)
            accepted = []
            for index in live:
                chain, row = chains[index], said[index]
                count = agreed(chain, row, vocabulary)
                decoding.stats.verified(len(chain), count)
                accepted.append(count)
                count += 1
                gained = row[:count]
                new[index] += gained
                last[index] = gained[-1]
                past[index] += count
                starts[index] += count
                room = rooms[index] = rooms[index] - count
                if room <= 0 or not eos.isdisjoint(gained):
                    ended = True
                drafter.learn(index, gained, more[index])
                chains[index] = drafter.chain(index, room - 1) if room > 1 else []
            self.ready.learn(fed, evidence, accepted, took)
            ended = ended or self.ready.enough
        feeder.seconds += seconds
        decoding.stats.count(steps, len(live))
        return steps

    def _call(
        self, width: int, rows: Sequence[Sequence[int]]
    ) -> tuple[StepInputs, Call | CallInTurn]:
        """Memory of a step of so many columns, and the call that is made on it. rows: fed then."""
        feeder = self.decoding.feeder
        memory = feeder.buffers(width, rows=rows)
        return memory, memory.chain.fetching(feeder.executable, self.fetch)


def chains_of(decoding: Decoding) -> ReadyChains | None:
    """What says how much of the drafter's chains is verified; None: it is asked step by step."""
    drafter, length = decoding.drafter, decoding.length
    if isinstance(drafter, ChainDrafter) and drafter.ready:
        return length.chains()
    return length.made_chains()


def rooms_of(decoding: Decoding) -> list[int]:
    """Levels of a draft that each text has room for."""
    return [0 if text.done else text.room for text in decoding.texts]
