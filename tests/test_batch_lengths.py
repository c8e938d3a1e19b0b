"""BASS's rule: one length for a batch, after its best text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_proposers import taken
from runtime_models import TableExecutable, program
from test_runtime_lengths import Executable, level
from test_runtime_sampling import assert_distributed, texts_drawn
from test_runtime_verifiers import DRAFT, LENGTH, PROMPT, RULE, VOCAB, exact

from graftwork.ir import InputError
from graftwork.ir.plan import BatchLength, Chain, StaticTree
from graftwork.runtime.feeding.draft import NO_DRAFT, Draft
from graftwork.runtime.speculate.lengths.batch import BatchPolicy


def policy(batch: int = 3, most: int = 40, tree=None, **options) -> BatchPolicy:
    return BatchPolicy(BatchLength(**options), Executable(most, tree), batch)


def step(policy: BatchPolicy, *accepted: int, drafted: int | None = None) -> list[int]:
    """The lengths after a step in which each text accepted so many of its draft's tokens."""
    size = policy.length if drafted is None else drafted
    drafts = [Draft(list(range(size)))] * len(accepted)
    policy.observe(taken(drafts, [range(count) for count in accepted]), 0, 0)
    return policy.limits([100] * len(accepted))


def test_the_rule_by_hand():
    """l0 = 7, l_incre = 2, l_mod = 10, l_limit = 32."""
    bass = policy()
    assert bass.limits([100] * 3) == [7, 7, 7]
    assert step(bass, 7, 2, 0) == [9] * 3  # some text accepted all
    assert step(bass, 0, 9, 9) == [11] * 3
    assert step(bass, 4, 3, 0) == [9] * 3  # 11 - ceil(11 / 10) - 0
    assert step(bass, 0, 0, 0) == [7] * 3  # 9 - 1 - 1: the second in turn
    assert step(bass, 0, 0, 6) == [6] * 3  # 7 - 1 - 1 is less than what one accepted
    assert step(bass, 0, 6, 0) == [8] * 3
    assert step(bass, 0, 1, 0) == [7] * 3  # the first again
    for _ in range(20):
        step(bass, 0, 0, 0)
    assert bass.limits([100] * 3) == [1] * 3
    for _ in range(20):
        step(bass, bass.length, 0, 0)
    assert bass.limits([100] * 3) == [32] * 3


def test_what_the_plan_or_the_room_allows_is_whole():
    bass = policy(batch=1, most=5)
    assert bass.limits([100]) == [5]
    assert step(bass, 5, drafted=5) == [5] and bass.length == 9
    assert step(bass, 2, drafted=2) == [5] and bass.length == 11
    assert bass.limits([0]) == [0]


def test_steps_without_drafts_teach_nothing():
    bass = policy(batch=2)
    bass.observe(taken([NO_DRAFT] * 2, [(), ()]), 0, 0)
    assert bass.length == 7
    bass.observe(taken([NO_DRAFT, Draft([1] * 7)], [(), range(7)]), 0, 0)
    assert bass.length == 9


def test_a_tree_is_as_deep_as_that():
    bass = policy(batch=2, tree=StaticTree(), start=2)
    assert bass.limits([5, 5]) == [40, 40]
    assert bass.goes_on(level([0.5], [0.5]), 1).all()
    assert not bass.goes_on(level([0.5], [0.5]), 2).any()
    deep = Draft([1, 2, 3], None, (-1, -1, 0))
    bass.observe(taken([deep, deep], [(0, 2), ()]), 0, 0)
    assert bass.length == 4


@pytest.mark.parametrize("options", [{"start": 40}, {"least": 8}, {"limit": 6}, {"shrink": 0}])
def test_impossible_rules_are_refused(options):
    with pytest.raises(InputError):
        BatchLength(**options)


@pytest.mark.parametrize("size", [(1, 120), (4, 50)], ids=str)
def test_samples_follow_the_models_distribution(size):
    held = program(VOCAB, draft=DRAFT, tree=Chain(depth=3))
    held = held.replace(plan=replace(held.plan, length=BatchLength(start=2)))
    found, accepted, drafted = texts_drawn(TableExecutable(RULE, held), PROMPT, LENGTH, size, {})
    assert_distributed(found, exact({}))
    assert 0.05 < accepted / drafted < 0.95
