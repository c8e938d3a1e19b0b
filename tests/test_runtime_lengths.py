"""Length policies: when they stop, and that measuring never costs more than it may."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from fake_proposers import FakeDraft, taken

from graftwork.ir import InputError
from graftwork.ir.execution.executable import ANY, Widths
from graftwork.ir.plan import (
    Chain,
    ConfidenceLength,
    DecodePlan,
    GoodputLength,
    StaticTree,
    SvipLength,
    ThompsonLength,
)
from graftwork.runtime.feeding.draft import NO_DRAFT, Draft
from graftwork.runtime.memo import LEARNT
from graftwork.runtime.speculate.costs import Costs
from graftwork.runtime.speculate.lengths.confidence import ConfidencePolicy
from graftwork.runtime.speculate.lengths.goodput import GoodputPolicy
from graftwork.runtime.speculate.lengths.svip import SvipPolicy, entropy
from graftwork.runtime.speculate.lengths.thompson import ThompsonPolicy
from graftwork.runtime.speculate.level import Level

pytestmark = pytest.mark.measured


class Executable:
    """A plan, and the widths there are."""

    def __init__(self, most, tree=None, widths=None):
        plan = DecodePlan(draft=FakeDraft(most), tree=tree or Chain())
        step = SimpleNamespace(name="step", has_input=lambda name: False)
        self.program, self._widths = SimpleNamespace(plan=plan, step=step), widths
        self.kept = {}

    def scratch(self, owner, *, shared=False):
        return self.kept.setdefault(owner, {})

    def widths(self, function):
        return ANY if self._widths is None else Widths(self._widths)


def level(*probs, logits=None):
    """A level of one node a sequence with these candidates' probabilities; None: no candidate."""
    tokens = [[[-1 if p is None else t for t, p in enumerate(row)]] for row in probs]
    scores = [[[0.0 if p is None else math.log(p) for p in row]] for row in probs]
    return Level(np.array(tokens), np.array(scores, dtype=np.float32), logits)


def test_svip_stops_where_entropy_is_high():
    policy = SvipPolicy(SvipLength(threshold=0.4), Executable(5), 3)
    sure, torn, empty = [0.98, 0.01], [0.4, 0.3], [None, None]
    assert policy.goes_on(level(sure, torn, empty), 1).tolist() == [True, False, True]


def test_svip_entropy_is_the_whole_distribution_s_where_it_is_known():
    logits = np.log(np.array([[[0.5, 0.25, 0.25]]], dtype=np.float32)) + 7
    exact = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25))
    assert entropy(level([0.5], logits=logits)) == pytest.approx([exact], rel=1e-5)
    # From candidates alone the rest counts as one: never more than the truth.
    assert entropy(level([0.5])) == pytest.approx([math.log(2)], rel=1e-5)
    assert entropy(level([1.0])) == pytest.approx([0.0], abs=1e-6)


def test_confidence_asks_the_best_candidate_and_has_a_depth():
    policy = ConfidencePolicy(ConfidenceLength(threshold=0.6, depth=3), Executable(9), 3)
    here = level([0.6, 0.3], [0.59, 0.3], [None, None])
    assert policy.goes_on(here, 1).tolist() == [True, False, False]
    assert not policy.goes_on(here, 3).any()
    assert policy.limits([4, 0, 1]) == [9, 0, 9]


def play_thompson(chance, steps=300, tree=None):
    """Mean length of the last drafts where every token is accepted with this chance."""
    policy = ThompsonPolicy(ThompsonLength(seed=3), Executable(10, tree), 1)
    random, lengths = np.random.default_rng(0), []
    for _ in range(steps):
        (count,) = policy.limits([20])
        accepted = int((random.random(count) < chance).cumprod().sum())
        policy.observe(taken([Draft(list(range(count)))], [range(accepted)]), 0, 0)
        lengths.append(count)
    return np.mean(lengths[-100:])


def test_thompson_learns_how_long():
    assert play_thompson(0.05) < 1.3
    assert 1.5 < play_thompson(0.5) < 2.5
    assert play_thompson(0.98) > 8


def test_thompson_draws_lengths_from_its_posterior():
    """After 3 accepted tokens and a rejected one it is Beta(4, 2), of mean 2/3: behind the first
    token each is drafted with a chance of its own, so k tokens or more with (2/3)^(k - 1)."""
    policy = ThompsonPolicy(ThompsonLength(seed=1), Executable(10), 1)
    policy.observe(taken([Draft([1, 2, 3, 4])], [range(3)]), 0, 0)
    assert (policy.accepted.tolist(), policy.rejected.tolist()) == ([4], [2])
    lengths = np.array([policy.limits([20])[0] for _ in range(4000)])
    for least, share in ((1, 1), (2, 2 / 3), (3, 4 / 9), (5, 16 / 81)):
        assert (lengths >= least).mean() == pytest.approx(share, abs=0.03)


def test_thompson_limits_a_tree_s_depth_and_not_its_nodes():
    policy = ThompsonPolicy(ThompsonLength(), Executable(40, StaticTree()), 2)
    assert policy.limits([5, 0]) == [40, 0]
    policy.depths = np.array([1, 3])
    assert policy.goes_on(level([0.5], [0.5]), 2).tolist() == [False, True]


def test_thompson_does_not_learn_from_a_text_that_ended():
    policy = ThompsonPolicy(ThompsonLength(), Executable(4), 2)
    ended = taken([Draft([1, 2, 3, 4])] * 2, [range(2), range(2)])
    ended.tokens[0].pop()
    policy.observe(ended, 0, 0)
    assert policy.accepted.tolist() == [3, 3] and policy.rejected.tolist() == [1, 2]


def test_costs_lie_on_lines_between_measured_widths_and_never_fall():
    costs = Costs()
    costs.add(1, 1.0)
    assert costs.at(np.array([1, 11])) == pytest.approx([1.0, 1.5])
    costs.add(11, 2.0)
    costs.add(21, 1.9)
    assert costs.at(np.array([6, 11, 21])) == pytest.approx([1.5, 2.0, 2.0])
    widths = np.arange(1, 40)
    assert costs.at(widths).tolist() == pytest.approx([costs.one(int(w)) for w in widths])
    assert costs.one(31) >= 2.0


def test_costs_forget_a_first_step_that_compiled_something():
    costs = Costs()
    costs.add(1, 500.0)
    assert costs.add(1, 1.0) == 1.0
    assert costs.one(1) == pytest.approx(1.0)
    # Another width's first: what was expected counts, and the next one is believed.
    assert costs.add(5, 100.0) == pytest.approx(1.2)
    assert costs.known(5) == 0
    assert costs.add(5, 4.0) == 4.0
    costs.add(5, 1.3)
    assert costs.one(5) == pytest.approx(1.3)


def test_a_width_s_first_step_decides_nothing_where_it_took_unusually_long():
    costs = Costs()
    for _ in range(3):
        costs.add(1, 1.0)
    assert costs.add(2, 2.4) == pytest.approx(1.05)  # what it found is memory
    assert costs.known(2) == 0 and costs.one(2) == pytest.approx(1.05)
    assert costs.add(2, 1.3) == 1.3 and costs.one(2) == 1.3
    costs.add(3, 1.9)  # no more than that: believed at once
    assert costs.known(3) == 1


def test_costs_follow_slowly():
    costs = Costs()
    for seconds in (1.0, 1.0, 2.0):
        costs.add(1, seconds)
    assert costs.one(1) == pytest.approx(1.5)
    assert costs.add(1, 50.0) == pytest.approx(1.5)
    assert costs.one(1) == pytest.approx(1.5 + 3.0 / 3)
    for _ in range(40):
        costs.add(1, 1.0)
    costs.add(1, 2.0)
    assert costs.one(1) == pytest.approx(1.1, abs=0.05)


class World:
    """Steps that cost 1 + slope * (columns - 1), and drafts accepted token by token.

    A draft takes `tree`, and `drafting` a token. Policies see times with noise; a width's first
    step takes ten times as long, which does not count. `seconds` is what 128 tokens took, plain
    decoding's being 127.
    """

    def __init__(self, most, chance, slope, seed=0, drafting=0.0, widths=None, tree=0.0):
        self.executable = Executable(most, widths=widths)
        self.chance, self.slope, self.drafting, self.tree = chance, slope, drafting, tree
        self.random, self.seen = np.random.default_rng(seed), set()
        self.sizes = []

    def play(self, record, tokens=128):
        policy = GoodputPolicy(record, self.executable, 1)
        done, seconds, self.sizes = 1, 0.0, []
        while done < tokens:
            gained, spent = self.play_step(policy, tokens - done)
            done, seconds = done + gained, seconds + spent
        return seconds

    def play_step(self, policy, room):
        """Tokens that a step gains, and what it takes."""
        (size,) = policy.limits([room])
        size = min(size, room)
        draft = Draft(list(range(size))) if size else NO_DRAFT
        accepted = int((self.random.random(size) < self.chance).cumprod().sum())
        step = 1 + self.slope * size
        shown = step * self.random.uniform(0.95, 1.1) * (1 if size in self.seen else 10)
        self.seen.add(size)
        drafting = self.drafting * size + (self.tree if size else 0.0)
        policy.observe(taken([draft], [range(accepted)]), drafting, shown)
        self.sizes.append(size)
        return accepted + 1, step + drafting


def test_goodput_drafts_after_two_plain_steps_of_a_process():
    world = World(4, 0.9, 0.05)
    world.play(GoodputLength(), 12)
    assert world.sizes[:3] == [0, 0, 1] and all(world.sizes[2:])


def test_goodput_tries_no_wider_drafts_while_none_came_to_anything():
    """A width's first step costs more than it will, so each of them is a loss of its own."""
    world = World(40, 0.0, 0.02)
    for _ in range(3):
        world.play(GoodputLength())
        assert max(world.sizes) <= 1
    world.chance = 0.95
    world.play(GoodputLength(), 2000)
    assert max(world.sizes) > 20


@pytest.mark.parametrize("most", [1, 10, 80])
@pytest.mark.parametrize("slope", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_goodput_never_loses_more_than_a_twentieth(most, slope, chance):
    for seed in range(3):
        world = World(most, chance, slope, seed)
        assert world.play(GoodputLength()) < 127 / 0.95
        assert world.play(GoodputLength()) < 127 / 0.95  # what was learned stays


def test_goodput_tries_ever_more_rarely_what_keeps_not_to_pay():
    world = World(10, 0.1, 0.3)
    tries, seconds = [], 0.0
    for _ in range(12):
        seconds = world.play(GoodputLength())
        tries.append(sum(map(bool, world.sizes)))
    assert sum(tries[6:]) <= 4 < sum(tries)
    assert seconds < 127 / 0.98


def best_fixed(chance, slope, most):
    """Tokens a second of the best fixed size."""
    return max(
        sum(chance**i for i in range(size + 1)) / (1 + slope * size) for size in range(most + 1)
    )


@pytest.mark.parametrize(
    ("chance", "slope", "most"), [(0.9, 0.05, 10), (0.7, 0.1, 10), (0.95, 0.02, 40)]
)
def test_goodput_comes_near_the_best_fixed_size(chance, slope, most):
    seconds, tokens = 0.0, 0
    world = World(most, chance, slope)
    world.play(GoodputLength())
    for _ in range(10):
        seconds, tokens = seconds + world.play(GoodputLength()), tokens + 127
    assert tokens / seconds > 0.85 * best_fixed(chance, slope, most)


def test_goodput_counts_the_time_that_drafts_take():
    """At 0.7 a token pays if columns cost nothing, but not if drafting it costs a step."""
    world = World(5, 0.7, 0.0, drafting=1.0)
    world.play(GoodputLength())
    assert sum(map(bool, world.sizes)) < len(world.sizes) / 5
    cheap = World(5, 0.7, 0.0, drafting=0.0)
    cheap.play(GoodputLength())
    assert sum(map(bool, cheap.sizes)) > len(cheap.sizes) / 2


def test_goodput_counts_what_a_draft_takes_whatever_its_size():
    """A tree grown level by level costs three steps, large or small: no size of it pays, and sixty
    sizes are not sixty tries."""
    world = World(60, 0.7, 0.01, tree=3.0)
    assert world.play(GoodputLength()) < 127 / 0.95
    assert world.play(GoodputLength()) < 127 / 0.95
    assert sum(map(bool, world.sizes)) <= 2


@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_goodput_gives_up_what_another_policy_would_draft(chance):
    """Thompson sampling alone drafts one token at least, whatever it costs."""
    record = GoodputLength(of=ThompsonLength())
    for seed in range(3):
        world = World(6, chance, 1.0, seed)
        assert world.play(record) < 127 / 0.95
        assert world.play(record) < 127 / 0.95


def test_goodput_lets_another_policy_end_what_pays():
    world = World(40, 0.6, 0.1)
    world.play(GoodputLength(of=ThompsonLength()))
    world.play(GoodputLength(of=ThompsonLength()))
    drafted = [size for size in world.sizes if size]
    assert len(drafted) > len(world.sizes) / 2
    assert len(set(drafted)) > 2 and np.mean(drafted) < 8


def test_goodput_asks_the_policy_in_it_about_levels():
    policy = GoodputPolicy(GoodputLength(of=ConfidenceLength(0.6, 3)), Executable(10), 2)
    sure = level([0.7, 0.1], [0.5, 0.2])
    assert policy.goes_on(sure, 1).tolist() == [True, False]
    assert policy.goes_on(sure, 3).tolist() == [False, False]
    assert policy.record.by_level and not GoodputLength().by_level


def test_goodput_expects_what_came_of_a_size_on_the_mean():
    """Five were asked for, of which another policy made two, of which one was accepted."""
    policy = GoodputPolicy(GoodputLength(), Executable(5), 1)
    known = policy.known
    known.learn(taken([Draft([1, 2])], [range(1)]), [5])
    new, old = 1.0, 0.97
    made = np.array([1, 1, old / (old + new), old / (old + new), old / (old + new)])
    assert known.sizes() == pytest.approx([0, *made.cumsum()])
    first = (1 + old / 2) / (old + new)
    hits = old * np.array([1 / 2, *first ** np.arange(2, 6)]) + [1, 0, 0, 0, 0]
    assert known.expected() == pytest.approx(1 + np.array([0, *(hits / (old + new)).cumsum()]))
    known.learn(taken([Draft([1, 2])], [range(1)]), [0])  # a grammar's: nobody asked for it
    assert known.asked[0] == known.made[0] and known.asked[4] > known.made[4]


def test_goodput_expects_of_further_tokens_what_the_first_ones_taught():
    world = World(8, 0.95, 0.02, drafting=0.1)
    world.play(GoodputLength(), 48)
    assert max(world.sizes[: [*map(bool, world.sizes)].index(True) + 5]) >= 4
    policy = GoodputPolicy(GoodputLength(), Executable(4), 1)
    policy.known.learn(taken([Draft([1])], [range(0)]), [1])
    rare = policy.known.expected()[1:] - policy.known.expected()[:-1]
    assert rare == pytest.approx([0.97 / 2 / 1.97, 1 / 3, 1 / 4, 1 / 5])


def test_goodput_takes_what_brings_a_drafter_up_to_a_text_for_no_part_of_a_draft():
    policy = GoodputPolicy(GoodputLength(), Executable(4), 1)
    plain = taken([NO_DRAFT], [range(0)])
    for _ in range(20):
        policy.limits([4])
        policy.observe(plain, 0.0, 1.0)
    before = policy.account()
    policy.prepared(0.5)
    policy.observe(taken([Draft([1])], [range(1)]), 0.1, 1.1)
    known = policy.known
    assert known.making.one(1) == pytest.approx(0.1)
    assert policy.account() == pytest.approx(before - 0.5 - 0.1 - 1.1 + 2 + 2 * 0.01)
    assert policy._size() == 3  # as wide as twice what was measured


def test_goodput_tries_a_drafter_that_was_brought_up_to_a_text_whatever_that_took():
    policy, tries = GoodputPolicy(GoodputLength(), Executable(1), 1), 0
    for _ in range(5):
        policy.observe(taken([NO_DRAFT], [range(0)]), 0.0, 1.0)
    policy.prepared(9.0)
    while policy.limits([1])[0]:
        policy.observe(taken([Draft([1])], [range(int(tries < 1))]), 0.1, 1.1)
        tries += 1
        assert policy.account() < 0
    # The first of them won .8 of a step, and the others lost .2 each.
    assert tries == 5


def test_goodput_tries_a_longer_draft_where_the_first_was_short_and_slow():
    """One token in .7 of a step does not pay; three in .9 may, and what brought the drafter up to
    the text is spent."""
    policy = GoodputPolicy(GoodputLength(), Executable(4), 1)
    for _ in range(3):
        policy.observe(taken([NO_DRAFT], [range(0)]), 0.0, 1.0)
    policy.prepared(9.0)
    policy.limits([4])
    policy.observe(taken([Draft([1])], [range(1)]), 0.7, 1.3)
    assert policy.limits([4]) == [3]
    policy.observe(taken([Draft([1, 2, 3])], [range(0)]), 0.9, 1.4)
    assert policy.limits([4]) == [0]


def test_goodput_tries_once_what_is_slow_to_bring_up_and_then_when_that_is_earned():
    executable = Executable(1)
    for asked in (True, False):
        policy, steps = GoodputPolicy(GoodputLength(), executable, 1), 0
        while steps < 64 and not policy.limits([1])[0]:
            policy.observe(taken([NO_DRAFT], [range(0)]), 0.0, 1.0)
            steps += 1
        assert (steps < 64) == asked
        if asked:
            policy.prepared(9.0)
            policy.observe(taken([Draft([1])], [range(0)]), 0.9, 1.1)
            policy.observe(taken([Draft([1])], [range(0)]), 0.9, 1.1)


def test_goodput_of_goodput_is_refused():
    with pytest.raises(InputError, match="gives up drafts itself"):
        GoodputLength(of=GoodputLength())


def test_goodput_says_for_how_long_it_rests():
    """What it says it will not draft, it does not, and steps that it is not shown count."""
    world = World(10, 0.0, 0.3)
    world.play(GoodputLength(), tokens=200)
    policy = GoodputPolicy(GoodputLength(), world.executable, 1)
    while (rest := policy.rest()) <= 1:
        policy.observe(taken([NO_DRAFT], [()]), 0.0, 1.0)
    for left in range(rest, 0, -1):
        assert policy.limits([50]) == [0] and policy.rest() == left
        if left % 2:
            policy.observe(taken([NO_DRAFT], [()]), 0.0, 1.0)
        else:
            policy.rested(1, 1.0)
    assert policy.rest() == 0


@pytest.mark.parametrize(("resting", "drafts"), [(1.0, True), (0.6, False)])
def test_goodput_compares_drafts_with_steps_of_a_rest(resting, drafts):
    """Two tokens in 1.3 steps pay, unless a plain step while nothing drafts takes 0.6 of one."""
    world = World(1, 1.0, 0.3)
    policy = GoodputPolicy(GoodputLength(), world.executable, 1)
    done, spent, sizes = 0, 0.0, []
    while done < 2000:
        if (rest := policy.rest()) >= 4:
            policy.rested(rest, resting * rest)
            done, spent = done + rest, spent + resting * rest
        else:
            gained, seconds = world.play_step(policy, 2000)
            done, spent = done + gained, spent + seconds
            sizes.append(world.sizes[-1])
    assert (sum(map(bool, sizes)) > 500) == drafts
    assert spent < 2000 * min(resting, 0.65) / 0.95


def test_goodput_decides_rarely_while_drafts_do_not_pay():
    """A decision takes a tenth of a step, so none is followed by another at once."""
    world = World(10, 0.1, 0.3)
    policy = GoodputPolicy(GoodputLength(), world.executable, 1)
    decisions, size = 0, policy._size

    def counting():
        nonlocal decisions
        decisions += policy.known.steps >= policy.known.until
        return size()

    policy._size = counting
    for _ in range(40):
        while (rest := policy.rest()) > 0:
            policy.rested(rest, float(rest))
        world.play_step(policy, 100)
    assert policy.known.steps > 10 * decisions


def test_goodput_forgives_a_draft_that_took_an_age():
    """Sixty steps for one token, once: it is tried again when what was earned pays for that."""
    world = World(5, 1.0, 0.05, drafting=0.05)
    world.drafting, usual = 60.0, world.drafting
    policy = GoodputPolicy(GoodputLength(), world.executable, 1)
    while not any(world.sizes):
        world.play_step(policy, 100)
    world.drafting = usual
    for _ in range(12000):
        world.play_step(policy, 100)
    assert sum(map(bool, world.sizes[-100:])) > 80


def test_goodput_notices_that_drafts_became_good():
    world = World(10, 0.0, 0.05)
    world.play(GoodputLength(), tokens=300)
    assert not any(world.sizes[-20:]) or sum(map(bool, world.sizes[-20:])) < 4
    world.chance = 1.0
    world.play(GoodputLength(), tokens=600)
    assert sum(world.sizes[-10:]) > 80


def test_goodput_prices_the_width_that_is_compiled():
    """Widths 4 and 16: two draft tokens cost what three do, and one what none does."""
    policy = GoodputPolicy(GoodputLength(), Executable(10, widths=(4, 16)), 1)
    assert policy.widths.tolist() == [4, 4, 4, 4] + [16] * 7
    for _ in range(2):
        assert policy.limits([20]) == [0]
        policy.observe(taken([NO_DRAFT], [()]), 0, 1.0)
    assert policy.limits([20]) == [3]


def test_goodput_knows_what_steps_take_after_forget():
    """Texts have taught nothing then, but a draft is tried at once: no step is timed anew."""
    world = World(4, 0.9, 0.05)
    world.play(GoodputLength())
    world.executable.scratch(LEARNT, shared=True).clear()
    policy = GoodputPolicy(GoodputLength(), world.executable, 1)
    assert policy.known.steps == 0 and policy.limits([50]) != [0]
