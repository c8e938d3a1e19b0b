"""Measured lengths of chains: those that lie ready, and those that the step itself makes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from fake_proposers import FakeDraft, taken
from test_runtime_lengths import World

from graftwork.ir.plan import GoodputLength
from graftwork.runtime.feeding.draft import NO_DRAFT
from graftwork.runtime.speculate.costs import Costs
from graftwork.runtime.speculate.lengths.goodput import GoodputPolicy
from graftwork.runtime.speculate.ready_chains import ChainKnowledge, MeasuredChains

pytestmark = pytest.mark.measured


class Copies:
    """Steps with chains that lie ready: after a long match (evidence 4) each token is accepted with
    a chance of `long`, after a short one (2) with `short`; every other step has one of either kind,
    where there is any. A step costs as in `World`."""

    def __init__(self, long, short, slope, most=10, loss=0.02):
        self.chances, self.slope, self.most = {4: long, 2: short}, slope, most
        self.random = np.random.default_rng(0)
        widths = range(1, most + 2)
        self.policy = MeasuredChains(loss, Costs(), widths, ChainKnowledge(most))
        self.fed = {4: 0, 2: 0}

    def play(self, tokens):
        """Steps that this many tokens take, in seconds of plain ones."""
        done, spent = 0, 0.0
        while done < tokens:
            evidence = [0, 4, 2][self.random.integers(3)]
            chance = self.chances.get(evidence, 0.0)
            size = min(self.policy.size([self.most if evidence else 0], [evidence]), self.most)
            size = size if evidence else 0
            accepted = int((self.random.random(size) < chance).cumprod().sum())
            took = 1 + self.slope * size
            self.policy.learn([size], [evidence], [accepted], took * self.random.uniform(0.95, 1.1))
            done, spent = done + 1 + accepted, spent + took
            if evidence:
                self.fed[evidence] += bool(size)
        return spent


@pytest.mark.parametrize("slope", [0.02, 0.15, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_chains_never_lose_more_than_a_fiftieth(slope, chance):
    world = Copies(chance, chance, slope)
    for _ in range(4):
        assert world.play(128) < 128 * 1.03


def test_chains_are_verified_after_long_matches_alone_where_short_ones_do_not_pay():
    world = Copies(0.95, 0.05, 0.15)
    world.play(300)
    before = dict(world.fed)
    assert world.play(2000) < 2000 * 0.75
    long, short = (world.fed[kind] - before[kind] for kind in (4, 2))
    assert long > 10 * short > 0  # what does not pay is tried again, ever more rarely


def test_one_slow_first_step_does_not_end_chains_that_pay():
    """As where the first step of two columns finds its memory, and takes twice as long."""
    policy = MeasuredChains(0.02, Costs(), range(1, 12), ChainKnowledge(10))
    for _ in range(2):
        assert policy.size([10], [4]) == 0
        policy.learn([0], [0], [0], 1.0)
    first = policy.size([10], [4])
    assert first > 0
    policy.learn([first], [4], [first], 2.2)
    for _ in range(6):
        size = policy.size([10], [4])
        assert size > 0
        policy.learn([size], [4], [size], 1 + 0.1 * size)


def test_chains_of_several_texts_share_a_step():
    """One text's long match pays for the step, and the others' chains come with it as far."""
    world = Copies(0.95, 0.95, 0.15)
    world.play(300)
    assert world.policy.size([10, 0], [4, 0]) > 0
    assert world.policy.size([0, 0], [0, 0]) == 0
    costly = Copies(0.95, 0.95, 0.9)
    costly.play(300)
    assert costly.policy.size([10, 0, 0, 0], [4, 0, 0, 0]) == 0


@dataclass(frozen=True)
class InStep(FakeDraft):
    """A draft that the step makes."""

    in_step = True


class StepWorld(World):
    """Chains that the step makes: it then costs `drafting` more, whether its chain is good or not;
    after steps without drafts a call makes the first chain, for twice that."""

    def __init__(self, most, chance, slope, drafting, seed=0):
        super().__init__(most, chance, slope, seed, drafting)
        plan = self.executable.program.plan
        self.executable.program.plan = replace(plan, draft=InStep(most))
        self.rested = True

    def play(self, record, tokens=128):
        policy = GoodputPolicy(record, self.executable, 1)
        chains = policy.made_chains()
        done, seconds, self.sizes = 1, 0.0, []
        while done < tokens:
            if steps := chains.steps():
                if self.rested:
                    chains.prepared(2 * self.drafting)
                    seconds, self.rested = seconds + 2 * self.drafting, False
                for _ in range(steps):
                    size = chains.size([policy.most], [0])
                    accepted = int((self.random.random(size) < self.chance).cumprod().sum())
                    step = 1 + self.drafting + self.slope * size
                    chains.learn([size], [0], [accepted], step * self.random.uniform(0.95, 1.1))
                    done, seconds = done + accepted + 1, seconds + step
                    self.sizes.append(size)
                    if chains.enough:
                        break
                continue
            self.rested = True
            if (rest := policy.rest()) >= 4:
                rest = min(rest, tokens - done)
                policy.rested(rest, rest * self.random.uniform(0.95, 1.1))
                done, seconds = done + rest, seconds + rest
                continue
            (size,) = policy.limits([tokens])
            assert not size
            policy.observe(taken([NO_DRAFT], [()]), 0.0, self.random.uniform(0.95, 1.1))
            done, seconds = done + 1, seconds + 1
        return seconds * 127 / (done - 1)


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.4])
def test_steps_that_draft_are_left_where_drafts_do_not_pay(chance):
    """A chain of four that costs .84 of a step, as with a vocabulary of 49k words."""
    for seed in range(4):
        world = StepWorld(4, chance, 0.05, 0.84, seed)
        spent = [world.play(GoodputLength()) for _ in range(6)]
        assert max(spent) < 127 / 0.95 and sum(spent) / len(spent) < 127 / 0.98


def test_steps_that_draft_stay_where_drafts_pay():
    world = StepWorld(4, 0.9, 0.05, 0.3)
    world.play(GoodputLength())
    spent = [world.play(GoodputLength()) for _ in range(8)]
    best = sum(0.9**i for i in range(5)) / (1 + 0.3 + 0.05 * 4)
    assert 127 * len(spent) / sum(spent) > 0.9 * best
