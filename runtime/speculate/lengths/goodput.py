"""The draft size that yields the most tokens a second, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....ir.execution.executable import Executable
from ....ir.plan import GoodputLength
from ....ir.plan.inputs import PACKED
from ...feeding.draft import VerifiedStep
from ...memo import learnt
from ..costs import Costs
from ..level import Ids, Level
from ..ready_chains import (
    FIRST,
    FORGET,
    HORIZON,
    SURE,
    ChainKnowledge,
    MeasuredChains,
    ReadyChains,
    imagined,
    plain_step,
)
from .base import LENGTHS, Flags, LengthPolicy

CALM = 16
"""Steps without drafts at least, once that seems best: the decision itself takes a tenth of one."""

WHOLE_EVERY, PLAIN_EVERY, PLAIN_RARELY = 16, 32, 256
"""Steps after which a whole draft, or none, is tried again where another size seems best; rarely
where the step after one without a draft has none either."""

STRETCH = 8
"""Steps with chains between two decisions, where the step makes them, and with drafts at most
before a rest was timed once."""


GRACE = 2
"""Drafts that are tried once a drafter was brought up to a text, which costs more than they do."""

MOST_EVERY = 1024
"""Steps between two tries, at most, where drafting has not paid again and again."""


class Timings:
    """What steps of an executable take at a batch size, which no text has to do with: `forget`
    leaves it.

    costs: seconds of a step by width; resting: of one while nothing is drafted for a while, under
    width 1. making: seconds that a draft takes by its size. looked: whether a rest was timed.
    preparing: seconds before a text's first draft, or the first after a rest, in which what the
    drafter lacks is made; None: not known.
    """

    preparing: float | None = None

    def __init__(self) -> None:
        self.looked = False
        self.costs, self.resting, self.making = Costs(), Costs(), Costs()
        self.making.add(0, 0.0)


class Knowledge:
    """What texts have taught with an executable at a batch size; it outlives a generation.

    asked, made, hits: f64[most], how often draft token i was asked for, verified and accepted,
    older drafts counting less; imagined: f64[most], what an imagined draft still counts in these.
    lost: seconds, next to plain decoding of `tokens` tokens. steps, whole, plain: steps so far, and
    at the last one with a whole draft or none. patience: steps from a whole draft to the next.
    tried: whether there was one. until: the step before which nothing is drafted.
    """

    def __init__(self, most: int, timings: Timings) -> None:
        self.timings = timings
        self.costs, self.resting, self.making = timings.costs, timings.resting, timings.making
        self.lost = self.tokens = 0.0
        self.steps = self.whole = self.plain = 0
        self.patience, self.until, self.tried = 0, 0, False
        self.asked, self.made, self.imagined = np.ones(most), np.ones(most), np.ones(most)
        self.hits = np.zeros(most)

    def learn(self, taken: VerifiedStep, asked: Sequence[int]) -> None:
        """What became of each draft token. asked: how many were, of each sequence."""
        for draft, path, wanted in zip(taken.drafts, taken.paths, asked, strict=True):
            self.count(len(draft.tokens), path, wanted)

    def count(self, made: int, path: Sequence[int], wanted: int) -> None:
        """What became of one draft of `made` tokens."""
        # What a grammar forces was not asked for, and may be longer than any draft of the plan.
        size = min(made, len(self.asked))
        wanted = max(size, wanted)
        each = (self.asked, wanted), (self.made, size), (self.hits, 0), (self.imagined, 0)
        for counts, found in each:
            counts[:wanted] *= FORGET
            counts[:found] += 1
        self.hits[[node for node in path if node < size]] += 1

    def plain_step(self, width: int) -> float:
        """Seconds of a step of this width without a draft; steps of a rest may take less."""
        step = plain_step(self.costs, width)
        return min(step, self.resting.one(1)) if self.resting.widths else step

    def expected(self) -> Any:
        """Tokens that a step yields if 0..most draft tokens are asked for, f64[most+1]."""
        first = sum((self.hits[:1] + self.imagined[:1] / 2) / self.asked[:1])
        rates = (self.hits + self.imagined * imagined(first, len(self.hits))) / self.asked
        return 1 + np.concatenate([[0.0], np.cumsum(rates)])

    def sizes(self) -> Any:
        """Tokens of a draft if 0..most are asked for, f64[most+1]."""
        return np.concatenate([[0.0], np.cumsum(self.made / self.asked)])


@LENGTHS.register(GoodputLength)
class GoodputPolicy(LengthPolicy):
    """Maximises expected tokens by expected seconds over the first k draft tokens, k = 0 included.

    The order of a draft's tokens is its own ranking (see `Draft.cut`), so acceptance is estimated
    by place in the draft. Drafts may end before k, because another policy says so or the drafter
    has no more: what is expected of k is the mean over those that came of it. What was lost so far
    against plain decoding is kept account of: trying sizes that do not seem best, and sizes that
    disappoint, ends where the account is used up. It starts with half of the record's `loss` and
    earns the other half token by token, so the first 128 tokens take 1 + `loss` times as long as
    plain decoding at worst, and later ones half of that, but for what it takes to bring a drafter
    up to a text, which is spent before anything is known: `GRACE` drafts come with it, and more as
    long as they win. Where drafting keeps not to pay, it is tried ever more rarely. Source: Liu et
    al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput"
    (SmartSpec, 2024).
    """

    record: GoodputLength

    def __init__(self, record: GoodputLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        key = self.key = (executable.program.plan.draft, batch, self.most)
        timed: dict[object, Timings] = executable.scratch(Timings, shared=True)
        kept: dict[object, Knowledge] = learnt(executable, Knowledge)
        timings = timed.setdefault(key, Timings())
        self.known = kept.setdefault(key, Knowledge(self.most, timings))
        holding = executable.widths(executable.program.step.name).holding
        self.widths = np.array([holding(size + 1) for size in range(self.most + 1)])
        self.of = LENGTHS.find(record.of)(record.of, executable, batch)
        self.wants = self.of.wants
        self.asked = [0] * batch
        self.packed = executable.program.step.has_input(PACKED)
        self.grace, self.won = 0, 0.0
        self.drafted = -self.most - 1  # before a text's first draft its prompt is made up for
        self.in_step = any(leaf.in_step for leaf in executable.program.plan.draft.leaves)
        self.plain_every = PLAIN_RARELY if self.in_step else PLAIN_EVERY

    def made_chains(self) -> ReadyChains | None:
        return _MadeChains(self) if type(self.of) is LengthPolicy else None

    def chains(self) -> MeasuredChains:
        kept: dict[object, ChainKnowledge] = learnt(self.executable, ChainKnowledge)
        known = kept.setdefault(self.key, ChainKnowledge(self.most))
        widths, packed = self.widths.tolist(), self.packed
        return MeasuredChains(self.record.loss, self.known.costs, widths, known, packed=packed)

    def limits(self, rooms: Sequence[int]) -> list[int]:
        size = self._size() if self.most else 0
        self.asked = [max(min(size, room), 0) for room in rooms]
        if not size:
            return self.asked
        return [min(size, count) for count in self.of.limits(rooms)]

    def chose(self, tokens: Ids) -> None:
        self.of.chose(tokens)

    def goes_on(self, level: Level, depth: int) -> Flags:
        return self.of.goes_on(level, depth)

    def _size(self) -> int:
        """Draft tokens of the next step."""
        known, costs = self.known, self.known.costs
        if known.steps < known.until:
            return 0  # plain steps teach nothing about drafts
        if costs.known(int(self.widths[0])) < FIRST:
            return 0
        looked = known.timings.looked
        if known.steps - known.plain >= (self.plain_every if looked else STRETCH):
            if not looked:  # steps of a rest may take less than one alone
                known.timings.looked, known.until = True, known.steps + SURE
            return 0
        reach = self._reach() + 1
        sizes = known.sizes()[:reach]
        widths = np.interp(sizes, np.arange(reach), self.widths[:reach])
        seconds = costs.at(widths) + known.making.at(sizes)
        plain = seconds[0] = known.plain_step(int(self.widths[0]))
        half, account = self.record.loss / 2, self.account()
        best = int(np.argmax(known.expected()[: len(seconds)] / seconds))
        if best and account < 0 and not self.earns:
            return self._none(-account / (half * plain))
        if best:
            known.patience = WHOLE_EVERY
        # What a try costs if nothing is accepted. The largest is made that half the loss at the
        # start pays for: a few tokens teach little. Where making any takes more than that, they
        # come with it, once it is earned.
        tries = seconds - plain
        ahead = known.timings.preparing
        if self.in_step:
            tries[1:] += plain if ahead is None else ahead
        elif known.tried and known.steps - self.drafted > self.most:
            tries[1:] += ahead or 0.0  # of a drafter of which nothing is known it is not asked
        risked = max(half * HORIZON * plain, 1.5 * tries[1])
        largest = int(np.searchsorted(tries, risked, side="right")) - 1
        due = known.steps - known.whole >= known.patience
        if due and tries[largest] <= account:
            known.whole, known.tried = known.steps, True
            known.patience = min(max(2 * known.patience, 1), MOST_EVERY)
            return largest
        if not best and self.grace:
            # Of what was spent on the text alone one draft shows too little, and a first one slow.
            return int(np.searchsorted(tries, max(risked, ahead or 0.0), side="right")) - 1
        if not best:
            undue = known.whole + known.patience - known.steps
            return self._none(max(undue, (tries[largest] - account) / (half * plain)))
        return best

    @property
    def earns(self) -> bool:
        """Whether drafts go on where the account is used up: the drafter was brought up to the text
        just now, or what came of it since then was a gain, so that stopping would lose more."""
        return self.grace > 0 or self.won > 0

    def _count(self, won: float) -> None:
        """A draft came to so many seconds over plain steps."""
        self.grace, self.won = max(self.grace - 1, 0), self.won + won

    def account(self) -> float:
        """Seconds that may be lost."""
        known = self.known
        plain = known.plain_step(int(self.widths[0]))
        return self.record.loss / 2 * (HORIZON + known.tokens) * plain - known.lost

    def _none(self, steps: float) -> int:
        """No draft for so many steps, or for as many as may be foreseen."""
        sure = self.known.costs.known(int(self.widths[0])) >= SURE
        rest = min(max(1 + int(steps), CALM), MOST_EVERY if sure else CALM)
        self.known.until = self.known.steps + rest
        return 0

    def _reach(self) -> int:
        """The largest size that may be tried: no more than twice as wide as what was measured, and
        no wider than that as long as no draft came to anything; unless a draft costs the same
        whatever is verified of it."""
        if self.in_step:
            return self.most
        limit = self.known.costs.widths[-1]
        if not self.known.tried or self.known.hits.any():
            following = self.widths[np.searchsorted(self.widths, limit, side="right") :][:1]
            limit = max(2 * limit, *following, 0)
        limit = max(limit, int(self.widths[1]))
        return int(np.searchsorted(self.widths, limit, side="right")) - 1

    def rest(self) -> int:
        return self.known.until - self.known.steps

    def rested(self, steps: int, seconds: float) -> None:
        known = self.known
        if steps:
            known.resting.add(1, seconds / steps)
            known.timings.looked = True
        known.steps += steps
        known.tokens += steps
        known.plain = known.steps

    def prepared(self, seconds: float) -> None:
        known, self.grace, self.won = self.known, GRACE, 0.0
        known.lost += seconds
        before = known.timings.preparing
        known.timings.preparing = seconds if before is None else min(before, seconds)

    def observe(self, taken: VerifiedStep, drafting: float, step: float) -> None:
        gained = [len(tokens) for tokens in taken.tokens if tokens]
        if not gained:
            return
        size = min(max(len(draft.tokens) for draft in taken.drafts), self.most)
        costs, mean = self.known.costs, sum(gained) / len(gained)
        # A draft that was asked for and not found is lost time, but no part of a plain step.
        fed = size
        if self.packed:  # a step costs what its texts' tokens do in the mean
            fed = min(round(sum(len(d.tokens) for d in taken.drafts) / len(gained)), self.most)
        spent, known = costs.add(int(self.widths[fed]), step), self.known
        if size:
            known.making.add(size, drafting, trusted=True)
        plain = known.plain_step(int(self.widths[0]))
        known.lost += spent + drafting - mean * plain
        known.learn(taken, self.asked)
        self.asked = [0] * self.batch
        self.of.observe(taken, drafting, step)
        known.steps += 1
        known.tokens += mean
        if size:
            known.until, self.drafted = 0, known.steps
            self._count(mean * plain - spent - drafting)
        else:
            known.plain = known.steps


class _MadeChains(ReadyChains):
    """Decides for a few steps at once on chains that the step before has made."""

    def __init__(self, policy: GoodputPolicy) -> None:
        self.policy, self.chosen = policy, 0

    def steps(self) -> int:
        known = self.policy.known
        self.chosen, self.enough = self.policy._size(), False
        tried = known.whole == known.steps
        return (1 if tried else STRETCH) if self.chosen else 0

    def size(self, sizes: Sequence[int], evidence: Sequence[int]) -> int:
        return min(self.chosen, max(sizes))

    def prepared(self, seconds: float) -> None:
        self.policy.prepared(seconds)

    def learn(
        self, fed: Sequence[int], evidence: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        policy, known, longest = self.policy, self.policy.known, max(fed)
        mean = 1 + sum(accepted) / len(fed)
        # A step without a chain made one, which is no part of a plain step.
        spent = known.costs.add(int(policy.widths[longest]), seconds) if longest else seconds
        if longest:
            known.making.add(longest, 0.0, trusted=True)
        won = mean * known.plain_step(int(policy.widths[0])) - spent
        known.lost -= won
        for size, count in zip(fed, accepted, strict=True):
            known.count(size, range(count), self.chosen)
        known.steps += 1
        known.tokens += mean
        known.until = 0
        policy._count(won)
        self.enough = policy.account() < 0 and not policy.earns
