"""Which predictions become the draft: best-first trees, static trees and chains."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_proposers import RuleProposer, executable, random_rule
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.ir.plan import BestFirst, Chain, FixedLength, StaticTree
from graftwork.runtime.feeding.draft import Draft, Topology
from graftwork.runtime.speculate.lengths.base import LengthPolicy
from graftwork.runtime.speculate.trees.best_first import BestFirstPolicy
from graftwork.runtime.speculate.trees.chain import ChainPolicy
from graftwork.runtime.speculate.trees.static import StaticTreePolicy


def fixed(batch):
    return LengthPolicy(FixedLength(), executable(100), batch)


class StopsAt(LengthPolicy):
    """Wants so many levels of each sequence."""

    def __init__(self, levels):
        super().__init__(FixedLength(), executable(100), len(levels))
        self.levels = np.array(levels)

    def goes_on(self, level, depth):
        return self.levels > depth


def paths_of(draft):
    """Every node's path of tokens, in order of the nodes."""
    return [tuple(draft.tokens[n] for n in draft.path(node)) for node in range(len(draft.tokens))]


def by_hand(rule, sequence, record, depth):
    """EAGLE-2 for one sequence, as its paper says it: (path, worth), the best first."""
    frontier, pool = [((), 0.0)], []
    for _ in range(min(record.depth, depth)):
        level = []
        for path, worth in frontier:
            found = rule(sequence, path)[: record.width]
            level += [((*path, t), np.float32(worth) + np.float32(s)) for t, s in found]
        pool += level
        frontier = sorted(level, key=lambda node: -node[1])[: record.width]
    return sorted(pool, key=lambda node: -node[1])[: record.nodes]


@settings(deadline=None, max_examples=150)
@given(
    depths=st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any),
    record=st.builds(BestFirst, st.integers(1, 25), st.integers(1, 4), st.integers(1, 5)),
    most=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_best_first_is_what_the_paper_says(depths, record, most, seed):
    rule = random_rule(50, most, seed)
    proposer = RuleProposer(rule, len(depths))
    drafts = BestFirstPolicy(record).grow(proposer, depths, fixed(len(depths)))
    for sequence, (draft, depth) in enumerate(zip(drafts, depths, strict=True)):
        assert paths_of(draft) == [path for path, _ in by_hand(rule, sequence, record, depth)]
    widths = [width for width, _ in proposer.calls]
    assert widths == [1] + [record.width] * (min(record.depth, max(depths)) - 1)
    assert {count for _, count in proposer.calls} == {record.width}


@settings(deadline=None, max_examples=50)
@given(nodes=st.integers(1, 25), seed=st.integers(0, 1000))
def test_a_cut_best_first_draft_keeps_the_best(nodes, seed):
    def grown(count):
        proposer = RuleProposer(random_rule(50, 5, seed), 1)
        return BestFirstPolicy(BestFirst(count, 4, 5)).grow(proposer, [4], fixed(1))[0]

    assert paths_of(grown(25).cut(nodes)) == paths_of(grown(nodes))


def even(sequence, path):
    """Two candidates everywhere, at 0.5 and 0.25."""
    return [(1, math.log(0.5)), (2, math.log(0.25))]


def test_scores_above_zero_still_give_a_tree():
    proposer = RuleProposer(lambda b, path: [(1, 3.0), (2, 1.0)], 1)
    draft = BestFirstPolicy(BestFirst(6, 3, 2)).grow(proposer, [3], fixed(1))[0]
    assert all(parent < node for node, parent in enumerate(draft.parents))


def test_gain_stops_before_levels_that_add_little():
    """Level d adds 0.75^d for 2^d nodes: 0.75, 0.5625, 0.42, 0.32."""
    for gain, levels in [(0.0, 4), (0.5, 3), (0.6, 2), (0.8, 1)]:
        proposer = RuleProposer(even, 1)
        record = BestFirst(1000, 4, 16, gain=gain)
        draft = BestFirstPolicy(record).grow(proposer, [9], fixed(1))[0]
        assert len(proposer.calls) == levels
        assert max(draft.shape.depths) == levels


def test_least_leaves_improbable_nodes_out():
    record = BestFirst(1000, 4, 16, least=0.12)
    draft = BestFirstPolicy(record).grow(RuleProposer(even, 1), [9], fixed(1))[0]
    assert paths_of(draft) == [(1,), (2,), (1, 1), (1, 2), (2, 1), (1, 1, 1)]


def test_no_candidates_no_draft():
    proposer = RuleProposer(lambda b, path: even(b, path) if b else [], 2)
    empty, full = BestFirstPolicy(BestFirst(4, 2, 2)).grow(proposer, [2, 2], fixed(2))
    assert not empty.tokens and len(full.tokens) == 4


POLICIES = [
    ChainPolicy(Chain(4)),
    StaticTreePolicy(StaticTree.of([(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)])),
    BestFirstPolicy(BestFirst(1000, 4, 4)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_each_sequence_is_as_deep_as_its_length_policy_wants(policy):
    proposer = RuleProposer(even, 3)
    drafts = policy.grow(proposer, [9, 9, 2], StopsAt([1, 3, 4]))
    assert [max(draft.shape.depths) for draft in drafts] == [1, 3, 2]
    assert len(proposer.calls) == 3


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_no_deeper_than_the_proposer(policy):
    proposer = RuleProposer(even, 1, depth=2)
    (draft,) = policy.grow(proposer, [9], fixed(1))
    assert max(draft.shape.depths) == len(proposer.calls) == 2


def test_static_order_is_the_record_s():
    tree = StaticTree(((0,), (0, 0), (1,), (0, 1), (1, 0)))
    policy = StaticTreePolicy(tree)
    (draft,) = policy.grow(RuleProposer(even, 1), [9], fixed(1))
    assert draft == Draft([1, 1, 2, 2, 1], None, (-1, 0, -1, 0, 2))
    (draft,) = policy.grow(RuleProposer(even, 1), [1], fixed(1))
    assert draft == Draft([1, 2], None, (-1, -1))


def test_a_static_tree_that_is_cut_keeps_its_most_valuable_nodes():
    """0.6, then 0.3 (0.6 * 0.5), then 0.24 (0.6 * 0.4); the tree of two is the first two."""
    best = StaticTree.best([[0.6, 0.2], [0.5, 0.4]], 4)
    assert best.paths == ((0,), (0, 0), (0, 1), (1,))
    (draft,) = StaticTreePolicy(best).grow(RuleProposer(even, 1), [9], fixed(1))
    assert draft.cut(2) == Draft([1, 1], None, (-1, 0))


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=90))
def test_topology_against_walking_up(picks):
    parents = [pick % (node + 1) - 1 for node, pick in enumerate(picks)]
    shape = Topology(parents)
    for node in range(-1, len(parents)):
        path = shape.path(node)
        seen = {0} | {above + 1 for above in path}
        row = shape.ancestors[node + 1].tolist()
        assert {column for column, sees in enumerate(row) if sees} == seen
        assert node < 0 or shape.depths[node] == len(path)
