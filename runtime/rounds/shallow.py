"""Steps with chains that the target's own first layers draft, token by token.

The result is the general step's. Each level of a draft is two held calls (see `Leader`), and
verification goes on from the states that the first layers left.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ..feeding.outputs import Outputs
from ..speculate.drafters.grown import GrownDrafter
from ..speculate.proposers.hidden import level_of
from ..speculate.proposers.shallow import LeadingProposer
from ..speculate.sampling import agreed
from .base import Decoding, Round
from .plain import FETCH, REST


class ShallowRound(Round):
    """The argmax decides on chains of best tokens."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding)
        drafter, plan = decoding.drafter, decoding.program.plan
        assert isinstance(drafter, GrownDrafter)
        assert isinstance(drafter.proposer, LeadingProposer)
        self.proposer, self.length = drafter.proposer, decoding.length
        self.deep = decoding.feeder.parts[self.proposer.parts :]
        self.levels = plan.most
        self.by_level = plan.length.by_level
        self.leader = self.proposer.leader(self.by_level)

    @classmethod
    def fits(cls, decoding: Decoding) -> bool:
        """Where first layers draft a chain and the argmax alone decides on it."""
        drafter, plan = decoding.drafter, decoding.program.plan
        led = isinstance(drafter, GrownDrafter) and isinstance(drafter.proposer, LeadingProposer)
        decided = decoding.argmax_decides and decoding.verifier.fetch == FETCH
        # Rows that are dropped, and outputs that other parts read, need general steps.
        alone = plan.cache.most is None and not decoding.length.wants
        wide = decoding.feeder.width(plan.most + 1, 0) > plan.most
        return led and plan.tree.chain and decided and alone and wide

    def run(self, most: int | None) -> int:
        decoding, live = self.decoding, self.decoding.live
        room = decoding.make_room(self.levels + 1, self.levels + 1)
        decoding.feeder.ahead = None
        rows = self.proposer.committed
        if rows is not None:
            rows.settle()
        new: list[list[int]] = [[] for _ in decoding.texts]
        steps = self._steps(new, live, self.least(most, room))
        self.commit(new, live)
        if rows is not None:
            rows.settled(new)
        return steps

    def _steps(self, new: list[list[int]], live: list[int], most: int) -> int:
        """Up to `most` steps, until a text may end or the length policy wants a rest; their tokens
        go to `new`. How many."""
        decoding, feeder, length = self.decoding, self.decoding.feeder, self.length
        texts, eos, fetch = decoding.texts, decoding.stopping.eos, FETCH
        vocabulary, committed = decoding.program.info.vocab_size, self.proposer.committed
        last = [0 if text.done else text.tokens[-1] for text in texts]
        past = [0 if text.done else text.rows for text in texts]
        starts = [0 if text.done else text.position for text in texts]
        rooms = [text.room for text in texts]
        steps, ended = 0, False
        while steps < most and not ended:
            before = decoding.clock()
            counts = list(map(min, rooms, length.limits(rooms)))
            chains = self._drafted(last, past, starts, counts)
            between = decoding.clock()
            drafts = [chain[:count] for chain, count in zip(chains, counts, strict=True)]
            rows = [[] if text.done else [last[b], *drafts[b]] for b, text in enumerate(texts)]
            memory = feeder.buffers(feeder.width(1 + max(counts), 0), self.deep, rows)
            memory.fill(rows, past)
            call = memory.chains(starts).fetching(feeder.executable, fetch)
            begun = perf_counter()
            outputs = call()
            feeder.seconds += perf_counter() - begun
            said = outputs.integers("argmax")
            steps += 1
            whole = False
            tokens: list[list[int]] = [[] for _ in texts]
            for index in live:
                row = said[index]
                count = agreed(drafts[index], row, vocabulary)
                decoding.stats.verified(len(drafts[index]), count)
                count += 1
                gained = row[:count]
                tokens[index] = gained
                new[index] += gained
                last[index] = gained[-1]
                past[index] += count
                starts[index] += count
                rooms[index] -= count
                whole = whole or (committed is not None and count > len(chains[index]))
                ended = ended or rooms[index] < 0 or not eos.isdisjoint(gained)
            if whole:  # the chains' last tokens are text, and have been asked nothing yet
                self.leader.follow(self._places(len(chains[0])))
            if committed is not None:
                committed.advance(list(map(len, tokens)))
            if length.learns:
                after = decoding.clock()
                length.observe(_taken(rows, tokens, outputs), between - before, after - between)
                ended = ended or length.rest() >= REST
        feeder.seconds += self.leader.seconds
        self.leader.seconds = 0.0
        decoding.stats.count(steps, len(live))
        return steps

    def _places(self, level: int) -> list[int]:
        """Rows of a cache of the draft's own for tokens `level` behind the texts' last ones."""
        committed = self.proposer.committed
        return [] if committed is None else [rows + level for rows in committed.rows]

    def _drafted(
        self, last: Sequence[int], past: Sequence[int], starts: Sequence[int], counts: list[int]
    ) -> list[list[int]]:
        """A chain for each sequence, led through the first parts; cuts `counts` as wanted."""
        leader, levels = self.leader, min(max(counts), self.levels)
        chains: list[list[int]] = [[] for _ in last]
        tokens, level = last, 0
        while True:
            leader.enter(tokens, [row + level for row in past], [s + level for s in starts])
            if level >= levels:
                return chains
            said = leader.follow(self._places(level))
            level += 1
            # Of each sequence's one column, the best candidate.
            tokens = [column[0] for (column,) in said.integers("draft_tokens")]
            for chain, token in zip(chains, tokens, strict=True):
                chain.append(token)
            if self.by_level:
                going = self.length.goes_on(level_of(said, 1), level).tolist()
                counts[:] = [
                    n if more else min(n, level) for n, more in zip(counts, going, strict=True)
                ]
                levels = min(levels, max(counts))


def _taken(
    rows: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], outputs: Outputs
) -> VerifiedStep:
    """A step as length policies are told of it. rows: what was fed; tokens: what was gained."""
    drafts = [Draft(list(row[1:])) if len(row) > 1 else NO_DRAFT for row in rows]
    paths = [range(max(len(new) - 1, 0)) for new in tokens]
    return VerifiedStep(drafts, paths, tokens, [0] * len(rows), outputs)
