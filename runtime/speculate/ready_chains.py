"""How much of chains that lie ready a step had best verify."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from .costs import Costs

FORGET = 0.97
"""What an earlier chain counts when a new one is seen."""

HORIZON = 128
"""Tokens of a generation over which no more than a share of plain decoding may be lost."""

FIRST, SURE = 2, 5
"""Plain steps that are measured before anything is compared with them, and before what they took
is believed."""

DOUBT = 0.9
"""What a plain step counts as until then, over what it took: the first steps of a process are slow,
and a draft must win by as much."""

PLAIN_EVERY = 64
"""Steps after which one without chains is measured again."""

SOON, LAST = 8, 1024
"""Steps between two tries of what does not seem to pay, at first and at most."""


class ReadyChains:
    """Verifies every chain as far as it goes: the base, and what fixed lengths do.

    enough: whether steps with chains had best end here.
    """

    enough = False

    def steps(self) -> int | None:
        """Steps with chains that had best be made now; 0: none; None: as many as there are."""
        return None

    def prepared(self, seconds: float) -> None:
        """What was to be done before them took so long."""

    def size(self, sizes: Sequence[int], evidence: Sequence[int]) -> int:
        """Tokens that a step had best verify, of chains of these sizes, one of each unfinished
        text. evidence: how much speaks for each chain, see `ChainDrafter.evidence`."""
        return max(sizes)

    def learn(
        self, fed: Sequence[int], evidence: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """What came of a step: tokens fed of each chain, tokens accepted, and what it took."""


def plain_step(costs: Costs, width: int) -> float:
    """Seconds of a step without drafts, of this width; see `SURE`."""
    return costs.one(width) * (1.0 if costs.known(width) >= SURE else DOUBT)


def imagined(first: float, most: int) -> list[float]:
    """How often each token of a draft that nobody has made would be accepted: ever more rarely, but
    after those before it no more rarely than the first tokens of drafts are.

    >>> imagined(0.9, 3)[1:], imagined(0.1, 3)[1:]
    ([0.81, 0.7290000000000001], [0.3333333333333333, 0.25])
    """
    held = accumulate([first] * most, mul)
    return [max(1 / (place + 2), often if place else 0.0) for place, often in enumerate(held)]


class Likelihood:
    """How far chains with as much evidence were accepted.

    gain: tokens that the first 0..most tokens of one are expected to yield. tried, patience: the
    last step in which one was tried although it did not seem to pay, and steps from there on
    before the next.
    """

    def __init__(self, most: int) -> None:
        self.seen, self.imagined, self.hits = [1.0] * most, [1.0] * most, [0.0] * most
        self.tried, self.patience = 0, SOON
        self._expect()

    def _expect(self) -> None:
        first = (self.hits[0] + self.imagined[0] / 2) / self.seen[0] if self.seen else 0.0
        often = imagined(first, len(self.seen))
        counts = zip(self.hits, self.imagined, often, self.seen, strict=True)
        self.gain = [0.0, *accumulate((hit + weight * p) / seen for hit, weight, p, seen in counts)]

    def learn(self, fed: int, accepted: int) -> None:
        for place in range(fed):
            self.seen[place] = FORGET * self.seen[place] + 1
            self.imagined[place] *= FORGET
            self.hits[place] = FORGET * self.hits[place] + (place < accepted)
        self._expect()


class ChainKnowledge:
    """What texts have taught of chains; it outlives a generation.

    lost: seconds, next to plain decoding of `tokens` tokens a text. steps, plain: steps so far, and
    at the last one without a chain.
    """

    def __init__(self, most: int) -> None:
        self.most, self.likely = most, dict[int, Likelihood]()
        self.lost = self.tokens = 0.0
        self.steps = self.plain = 0

    def likelihood(self, evidence: int) -> Likelihood:
        found = self.likely.get(evidence)
        if found is None:
            found = self.likely[evidence] = Likelihood(self.most)
        return found


class MeasuredChains(ReadyChains):
    """Verifies as many tokens as yield the most a second, none where plain steps do.

    As `GoodputPolicy`, for chains that take no time to make, so that each step decides anew by what
    speaks for the chains at hand: after a long match more is worth verifying than after a short
    one. costs: seconds of a step by width. widths: columns of a step by tokens that are verified.
    loss: share of plain decoding's time that finding out may cost. packed: whether a step costs
    what its texts' tokens do in the mean, and not what the longest of its chains does.
    """

    def __init__(
        self,
        loss: float,
        costs: Costs,
        widths: Sequence[int],
        known: ChainKnowledge,
        *,
        packed: bool = False,
    ) -> None:
        self.half, self.costs, self.known, self.packed = loss / 2, costs, known, packed
        self.widths = list(widths)
        last = len(self.widths) - 1
        # Of sizes that cost the same the largest is meant.
        self.sizes = [n for n in range(1, last) if self.widths[n] < self.widths[n + 1]]
        self.sizes += [last] if last else []

    def size(self, sizes: Sequence[int], evidence: Sequence[int]) -> int:
        known, costs = self.known, self.costs
        longest, narrow = max(sizes), self.widths[0]
        if not longest or costs.known(narrow) < FIRST or known.steps - known.plain >= PLAIN_EVERY:
            return 0
        plain, live = plain_step(costs, narrow), len(sizes)
        chains = [(size, known.likelihood(e)) for size, e in zip(sizes, evidence, strict=True)]
        reach = 2 * max(costs.widths[-1], narrow)
        best, most, largest = 0, live / plain, 0
        for size in self.sizes:
            size = min(size, longest)
            width = self._width([min(size, own) for own, _ in chains])
            if width > reach and largest:
                break
            largest = size
            gained = sum(likely.gain[min(size, own)] for own, likely in chains)
            rate = (live + gained) / costs.one(width)
            if rate > most:
                best, most = size, rate
            if size == longest:
                break
        account = self.half * (HORIZON + known.tokens) * plain - known.lost
        if best:
            return best if account >= 0 else 0
        return self._tried(largest, chains, account, plain)

    def _width(self, fed: Sequence[int]) -> int:
        """Columns that a step with so many tokens of each chain costs."""
        return self.widths[round(sum(fed) / len(fed)) if self.packed else max(fed)]

    def _tried(
        self, size: int, chains: list[tuple[int, Likelihood]], account: float, plain: float
    ) -> int:
        """`size` if it is time to try chains that do not seem to pay, and there is means to."""
        known = self.known
        due = [
            likely
            for own, likely in chains
            if own and known.steps - likely.tried >= likely.patience
        ]
        width = self._width([min(size, own) for own, _ in chains])
        if not due or self.costs.one(width) - plain > account:
            return 0
        for likely in due:
            likely.tried, likely.patience = known.steps, min(2 * likely.patience, LAST)
        return size

    def learn(
        self, fed: Sequence[int], evidence: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        known, live, longest = self.known, len(fed), max(fed)
        spent = self.costs.add(self._width(fed), seconds)
        known.steps += 1
        mean = 1 + sum(accepted) / live
        known.tokens += mean
        if not longest:
            known.plain = known.steps
            return
        known.lost += spent - mean * self.costs.one(self.widths[0])
        for size, e, count in zip(fed, evidence, accepted, strict=True):
            if size:
                known.likelihood(e).learn(size, count)
