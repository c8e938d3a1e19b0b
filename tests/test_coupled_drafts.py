"""Drafts that are drawn by the target's own noise: the text depends on seed and target alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from runtime_drafts import RuleDraft
from runtime_models import TableExecutable, markov, program
from test_runtime_sampling import assert_distributed

from graftwork.ir.plan import (
    Chain,
    DraftRecord,
    FixedLength,
    GoodputLength,
    Lossless,
    Record,
    Rejection,
    SampledTree,
    StaticTree,
    TreeRecord,
    WidenedChain,
)
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate
from graftwork.runtime.asking.options import read_options
from graftwork.runtime.asking.text import Text
from graftwork.runtime.rounds import base
from graftwork.runtime.speculate.lengths.base import LengthPolicy
from graftwork.runtime.speculate.noise import DraftNoise, Noise
from graftwork.runtime.speculate.sampling import Chances

VOCAB, PROMPT = 8, [0, 1, 2, 0]
RULE, OTHER = markov(VOCAB, seed=5, scale=1.4), markov(VOCAB, seed=6)
NEAR = RuleDraft(lambda seen: RULE(seen) / 2 + OTHER(seen))
FAR = RuleDraft(OTHER)
SHAPE = StaticTree.of([(0,), (1,), (0, 0), (1, 0)])


def noise(seed: int = 3) -> Noise:
    return Noise(torch.Generator().manual_seed(seed))


# -- the noise ------------------------------------------------------------------------------------


def test_a_race_by_hand() -> None:
    """Of times 2, 1, 4 and p = .5, .2, .3 token 0 is first, at 4; of q = .1, .6, .3 token 1."""
    made = noise()
    made.kept[0, 5, 3] = np.array([2.0, 1.0, 4.0])
    both = Chances(np.array([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]], dtype=np.float32), None)
    assert [made.winner(both, row, 0, 5) for row in (0, 1)] == [0, 1]
    text = Text([7, 7], 1, 9)  # one new token: the draft's fifth place is its token number 5
    drafted = DraftNoise(made, [text]).best(both, [0], 5, 3)
    assert drafted.tolist() == [[0, 1, 2]]  # arrivals at 4, 5 and 13.3


def test_winners_follow_the_distribution_and_places_are_independent() -> None:
    made, many = noise(), 20_000
    probs = np.array([[0.5, 0.2, 0.15, 0.1, 0.05, 0.0]], dtype=np.float32)
    chances = Chances(probs, None)
    pairs: Counter[tuple[int, ...]] = Counter()
    for text in range(many):
        pairs[made.winner(chances, 0, text, 0), made.winner(chances, 0, text, 1)] += 1
    p = probs[0].tolist()
    expected = {(a, b): p[a] * p[b] for a in range(5) for b in range(5)}
    assert_distributed(pairs, expected)


def test_candidates_have_the_noise_that_they_have_among_all() -> None:
    made = noise()
    whole = made.at(1, 2, 50).copy()
    ids = np.array([7, 0, 49])
    assert np.array_equal(made.at(1, 2, 3, ids), whole[ids])
    assert not np.array_equal(whole, made.at(1, 3, 50)) and (whole > 0).all()
    assert np.array_equal(noise().at(1, 2, 50), whole)
    assert not np.array_equal(noise(4).at(1, 2, 50), whole)


def test_no_more_is_kept_than_is_needed() -> None:
    made = noise()
    for place in range(100):
        made.at(0, place, 1 << 16)
    assert list(made.kept) == [(0, place, 1 << 16) for place in range(68, 100)]


@pytest.mark.parametrize("seed", range(4))
def test_as_many_agree_as_the_paper_says(seed: int) -> None:
    """P(both have the winner x) = 1 / sum_y max(p_y / p_x, q_y / q_x), whose sum over x is at least
    (1 - d) / (1 + d)."""
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.ones(6) * 0.7, 2)
    exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(6))
    distance = np.abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) <= exact + 1e-12 <= 1 - distance + 1e-9
    both, made, many = Chances(np.stack([p, q]), None), noise(seed), 4000
    same = sum(made.winner(both, 0, t, 0) == made.winner(both, 1, t, 0) for t in range(many))
    assert abs(same / many - exact) < 4.5 * (exact * (1 - exact) / many) ** 0.5


# -- texts ----------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 4, "temperature": 1.3},
    {"top_p": 0.9, "repetition_penalty": 1.1},
]
DRAFTED: dict[str, tuple[DraftRecord, TreeRecord]] = {
    "near, long": (NEAR, Chain(depth=5)),
    "near, short": (NEAR, Chain(depth=1)),
    "far": (FAR, Chain(depth=3)),
    "widened": (NEAR, WidenedChain(3, (0.4, 0.7), (3, 2, 1))),
    "best tokens": (NEAR, SHAPE),
    "copies": (SuffixDraft(tokens=3, shortest=1), Chain()),
}


def written(
    draft: DraftRecord | None, tree: TreeRecord | None, length: Record | None = None, **options: Any
) -> Any:
    made = program(VOCAB, context=128, draft=draft, tree=tree)
    if length is not None:
        made = made.replace(plan=replace(made.plan, length=length))
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    asked = {"max_new_tokens": 60, "do_sample": True, "seed": 11, "eos_token_id": [], **options}
    found = generate(
        TableExecutable(RULE, made), ids, pad_token_id=0, return_dict_in_generate=True, **asked
    )
    return found.sequences.tolist(), found.stats


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_seed_is_one_text_whatever_drafts(options: dict[str, Any]) -> None:
    plain, stats = written(None, None, **options)
    assert stats.accepted_tokens == 0
    for name, (draft, tree) in DRAFTED.items():
        text, stats = written(draft, tree, **options)
        assert text == plain, name
        assert 0 < stats.accepted_tokens < stats.draft_tokens, name
    assert written(None, None, **{**options, "seed": 12})[0] != plain


class Fickle(LengthPolicy):
    """Asks for drafts of any length, as a clock might."""

    clock = random.Random(1)

    def limits(self, rooms: Any) -> list[int]:
        return [self.clock.randint(0, 5) for _ in rooms]


def test_one_seed_is_one_text_however_long_drafts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = written(None, None)[0]
    monkeypatch.setattr(base.LENGTHS, "find", lambda record, *_: Fickle)
    texts = [written(NEAR, Chain(depth=5), FixedLength()) for _ in range(4)]
    assert all(text == plain for text, _ in texts)
    assert len({stats.draft_tokens for _, stats in texts}) > 1


def test_shared_noise_keeps_more_than_best_tokens_and_less_than_rejection() -> None:
    """A floor under what is kept, and the price of a text that drafts do not change."""
    rates = {}
    for name, draft, verify in (
        ("shared", NEAR, Lossless()),
        ("told", NEAR, Rejection()),
        ("best", replace(NEAR, said=False), Lossless()),
    ):
        made = program(VOCAB, context=256, draft=draft, tree=Chain(depth=1), verify=verify)
        ids = torch.tensor([PROMPT] * 40)
        found = generate(
            TableExecutable(RULE, made),
            ids,
            max_new_tokens=60,
            do_sample=True,
            seed=1,
            top_k=0,
            eos_token_id=[],
            return_dict_in_generate=True,
        )
        rates[name] = found.stats.accepted_tokens / found.stats.draft_tokens
    assert rates["best"] + 0.05 < rates["shared"] < rates["told"]
    distance = 1 - rates["told"]
    assert rates["shared"] > (1 - distance) / (1 + distance) - 0.03


# -- plans whose drafts say what they were sampled from --------------------------------------------


@pytest.mark.parametrize(
    ("changes", "coupled"),
    [
        ({}, True),
        ({"tree": WidenedChain()}, True),
        ({"tree": SampledTree((1, 1))}, False),
        ({"verify": Rejection()}, False),
    ],
    ids=str,
)
def test_a_seed_s_text_does_not_depend_on_time(changes: dict[str, Any], coupled: bool) -> None:
    """Where verification must know what drafts were sampled from, no length is measured for a text
    that a seed says."""
    plan = program(VOCAB, draft=NEAR).plan
    plan = replace(plan, tree=Chain(depth=3), length=GoodputLength())
    plan = replace(plan, **changes)
    assert plan.coupled is coupled
    made = program(VOCAB, tree=plan.tree).replace(plan=plan)
    for asked, measured in (({"seed": 1}, coupled), ({}, True), ({"do_sample": False}, True)):
        options = read_options({"do_sample": True, **asked}, made.info)
        chosen = plan.length if plan.coupled or not options.repeats else plan.length.steady
        assert (chosen == GoodputLength()) is measured
    texts = []
    for _ in range(2):
        ids = torch.tensor([PROMPT])
        given = {"max_new_tokens": 60, "do_sample": True, "seed": 5}
        texts.append(generate(TableExecutable(RULE, made), ids, **given).tolist())
    assert texts[0] == texts[1]
