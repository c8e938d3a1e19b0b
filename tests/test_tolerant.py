"""Generalized aggressive decoding: tokens that are nearly as likely as the target's best pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runtime_drafts import RuleDraft
from runtime_models import TableExecutable, markov, plain, program

from graftwork.ir.plan import Chain, Tolerant, TopKAccept
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.asking.options import GenerationOptions
from graftwork.runtime.speculate.verifiers.relaxed import TolerantVerifier

MANY = 12
RULE = markov(MANY, seed=3)
DRAFT = RuleDraft(lambda seen: RULE(seen) + markov(MANY, seed=4)(seen) / 2)
PROMPT = [1, 2, 3]


def run(verify, count=40):
    held = program(MANY, draft=DRAFT, tree=Chain(depth=4), verify=verify)
    asked = {"max_new_tokens": count, "return_dict_in_generate": True}
    return generate(TableExecutable(RULE, held), torch.tensor([PROMPT]), **asked)


@pytest.mark.parametrize(
    ("count", "gap", "bound"),
    [
        (4, 1.0, 0.4 * np.exp(-1.0)),  # the gap decides
        (3, 1.0, 0.15),  # the third decides
        (2, 1.0, 0.3),  # the second decides
        (3, 0.2, 0.4 * np.exp(-0.2)),
        (1, 9.0, 0.4),
        (9, 0.0, 0.4),
        (9, 50.0, 0.05),
    ],
)
def test_bounds_by_hand(count, gap, bound):
    held = program(5, verify=Tolerant(count, gap))
    verifier = TolerantVerifier(held.plan.verify, held, GenerationOptions(), 1)
    probs = np.array([[0.15, 0.4, 0.05, 0.3, 0.1]], dtype=np.float32)
    assert verifier.bounds(probs).tolist() == pytest.approx([bound])


@pytest.mark.parametrize("verify", [Tolerant(count=1, gap=5.0), Tolerant(count=9, gap=0.0)])
def test_without_tolerance_the_text_is_the_targets(verify):
    assert run(verify).sequences[0].tolist() == PROMPT + plain(RULE, PROMPT, 40)


def test_tolerance_keeps_more_and_every_token_is_near_the_best():
    strict, found = run(Tolerant(count=1)), run(Tolerant(count=4, gap=1.0))
    assert found.stats.steps < strict.stats.steps
    text, different = found.sequences[0].tolist(), 0
    for place in range(len(PROMPT), len(text)):
        scores = RULE(tuple(text[:place])).log_softmax(-1)
        own = float(scores[text[place]])
        assert own >= float(scores.max()) - 1.0 - 1e-5
        assert int((scores > own).sum()) < 4
        different += own < float(scores.max())
    assert different > 0
    wide = run(Tolerant(count=4, gap=100.0)).sequences
    assert torch.equal(wide, run(TopKAccept(count=4)).sequences)


def test_the_recipe_says_that_it_is_approximate():
    assert Recipe.load("generalized_aggressive").contract == "approximate"
