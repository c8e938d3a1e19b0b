"""Sampled trees of any shape: by hand, as wholes, and what they keep of the distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from every_recipe import steps_of
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_drafts import RuleDraft, RuleProposer
from runtime_models import TableExecutable, markov, plain, program, setting
from selection import one_in
from test_runtime_sampling import assert_distributed
from test_runtime_verifiers import DRAFT, PROMPT, RULE, VOCAB, exact, sample
from tiny import MASK, PROMPTS, tiny_llama

from graftwork.backends import Target, compile
from graftwork.ir import InputError, UnsupportedError
from graftwork.ir.plan import (
    Chain,
    DynamicSample,
    FixedLength,
    Lossless,
    SampledShape,
    StochasticBeam,
)
from graftwork.ir.plan.shapes import expected
from graftwork.passes.engine.manager import run_passes
from graftwork.runtime import generate
from graftwork.runtime.asking.options import GenerationOptions
from graftwork.runtime.speculate.lengths.base import LengthPolicy
from graftwork.runtime.speculate.trees import drawn
from graftwork.runtime.speculate.trees.base import TREES

SHAPE = SampledShape(((0,), (0, 0), (1,), (0, 1), (2,), (1, 0)))
TREES_TRIED = {
    "shape": SHAPE,
    "dynamic": DynamicSample(nodes=5, depth=2, width=2),
    "deep dynamic": DynamicSample(nodes=4, depth=3, width=3),
    "beam": StochasticBeam(width=2, depth=2),
    "wide beam": StochasticBeam(width=4, depth=2),
}
CASES = [(name, size) for name in TREES_TRIED for size in ((1, 160), (4, 60))]


@pytest.mark.parametrize(("name", "size"), one_in(3, CASES), ids=str)
def test_samples_follow_the_models_distribution(name, size):
    found, rate = sample(DRAFT, TREES_TRIED[name], Lossless(), size, {})
    assert_distributed(found, exact({}))
    assert 0.05 < rate < 0.95


@pytest.mark.parametrize("name", ["shape", "dynamic", "beam"])
def test_filters_apply_to_draft_and_target(name):
    options = {"top_k": 3, "top_p": 0.95, "temperature": 1.3}
    found, rate = sample(DRAFT, TREES_TRIED[name], Lossless(), (200, 2), options)
    assert_distributed(found, exact(options))
    assert 0.05 < rate < 0.95


@pytest.mark.parametrize("name", ["shape", "dynamic", "beam"])
def test_wrong_distributions_show(name, monkeypatch):
    """The tests can fail: tokens that were not sampled as the draft says are not lossless."""
    honest = drawn._distinct
    monkeypatch.setattr(drawn, "_distinct", lambda p, *rest: honest(p.flip(-1), *rest))
    found, _ = sample(DRAFT, TREES_TRIED[name], Lossless(), (300, 2), {})
    with pytest.raises(AssertionError):
        assert_distributed(found, exact({}))


def test_a_node_that_depends_on_its_own_token_shows(monkeypatch):
    """Keeping the likeliest tokens, and not the likeliest places, would not be lossless."""
    honest = drawn.DynamicSamplePolicy.level

    def likeliest(self, level, wanted, number):
        nodes, tokens, parents = honest(self, level, wanted, number)
        if number == 1:
            own = np.take_along_axis(level.logits[:, 0], nodes.tokens.clip(0), 1)
            nodes = nodes._replace(worth=own.astype(np.float64))
        return nodes, tokens, parents

    monkeypatch.setattr(drawn.DynamicSamplePolicy, "level", likeliest)
    found, _ = sample(DRAFT, DynamicSample(nodes=1, depth=1, width=3), Lossless(), (300, 4), {})
    with pytest.raises(AssertionError):
        assert_distributed(found, exact({}))


@pytest.mark.parametrize("name", TREES_TRIED)
def test_greedy_text_is_plain_decodings(name):
    rule = markov(12, seed=3)
    draft = RuleDraft(lambda seen: rule(seen) + markov(12, seed=4)(seen) / 2)
    found = {}
    for kind, tree in (("tree", TREES_TRIED[name]), ("chain", Chain(depth=1))):
        model = TableExecutable(rule, program(12, draft=draft, tree=tree))
        ids, mask = torch.tensor([[0, 0, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
        asked = {"max_new_tokens": 30, "pad_token_id": 0, "return_dict_in_generate": True}
        result = generate(model, ids, attention_mask=mask, **asked)
        assert result.sequences[0, 3:].tolist() == plain(rule, [5], 30)
        assert result.sequences[1, 3:].tolist() == plain(rule, [1, 2, 3], 30)
        found[kind] = result.stats.accepted_per_step
    assert found["tree"] > found["chain"] > 1


@pytest.mark.parametrize("name", TREES_TRIED)
def test_a_seed_repeats(name):
    model = TableExecutable(RULE, program(VOCAB, draft=DRAFT, tree=TREES_TRIED[name]))
    ids = torch.tensor([PROMPT] * 2)
    texts = [generate(model, ids, max_new_tokens=30, do_sample=True, seed=s) for s in (7, 7, 8)]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("name", ["shape", "dynamic", "beam"])
def test_distributions_are_needed_where_tokens_are_sampled(name):
    draft = RuleDraft(DRAFT.rule, said=False)
    model = TableExecutable(RULE, program(VOCAB, draft=draft, tree=TREES_TRIED[name]))
    with pytest.raises(UnsupportedError, match="whole distributions"):
        generate(model, torch.tensor([PROMPT]), max_new_tokens=6, do_sample=True)


RECIPES = ("sequoia", "dyspec", "rsd_c", "rsd_s", "spectr", "opt_tree", "svip")


@cache
def compiled(name: str, backend: str):
    """A recipe's program of a tiny model, compiled; what it drafts with knows the target's text."""
    with TemporaryDirectory() as folder:
        steps = steps_of(name, Path(folder))
    start = tiny_llama(4)
    made = run_passes(start.replace(guests={"other": tiny_llama(4)}), steps)[0]
    return compile(made, Target(backend, "cpu"))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *one_in(5, product(RECIPES, ["eager", "onnxruntime"])),
        *(pytest.param(name, "torch", marks=pytest.mark.long) for name in RECIPES),
    ],
)
def test_recipes_write_the_targets_text(name: str, backend: str):
    asked = {"max_new_tokens": 20, "eos_token_id": [], "attention_mask": MASK}
    wanted = generate(compiled("baseline", backend), PROMPTS, **asked)
    fast = compiled(name, backend)
    found = generate(fast, PROMPTS, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, wanted)
    alone = generate(fast, PROMPTS[2:3], max_new_tokens=20, eos_token_id=[])
    assert torch.equal(alone, wanted[2:3])
    # The draft model is the target: all that was drafted along the best path is kept.
    if name != "sequoia":  # which drafts where measured steps say that it pays
        assert found.stats.accepted_per_step > 1.5


# -- by hand --------------------------------------------------------------------------------------


def grown(tree, rule, depths, seed=0, **options):
    """Drafts of a policy for texts that the rule goes on with."""
    vocab = len(rule((0,)))
    asked = GenerationOptions(do_sample=True, top_k=0, seed=seed, **options)
    executable = TableExecutable(rule, program(vocab, draft=RuleDraft(rule), tree=tree))
    proposer = RuleProposer(RuleDraft(rule), setting(executable))
    proposer.begin([[0]] * len(depths))
    length = LengthPolicy(FixedLength(), executable, len(depths))
    return TREES.find(tree)(tree, asked).grow(proposer, depths, length)


def logits(*probs):
    return torch.tensor(probs).log()


def test_a_shape_is_drawn_as_it_says():
    drafts = grown(SHAPE, lambda seen: torch.zeros(9), [2, 1, 0])
    assert drafts[0].parents == (-1, 0, -1, 0, -1, 2)
    assert drafts[1].parents == (-1, -1, -1) and drafts[2].tokens == ()
    tokens = drafts[0].tokens
    assert len({tokens[0], tokens[2], tokens[4]}) == 3 and tokens[1] != tokens[3]
    # A distribution of two tokens has no third sample.
    two = grown(SHAPE, lambda seen: logits(0.5, 0.5, 0.0), [2])[0]
    assert two.parents == (-1, 0, -1, 0, 2)


@given(
    rates=st.lists(st.lists(st.floats(0.01, 0.45), min_size=1, max_size=3), min_size=1, max_size=3),
    nodes=st.integers(1, 9),
)
@settings(deadline=None, max_examples=60)
def test_the_best_shape_is_sequoias(rates, nodes):
    """T[m, l] of the dynamic program: the best of m nodes, the root included, within l levels."""
    rates = [sorted(row, reverse=True) for row in rates]

    def best(size: int, depth: int) -> float:
        return 1 + below(size - 1, depth, 0)

    def below(size: int, depth: int, rank: int) -> float:
        """The most that `size` nodes bring below one at `depth`, its samples from `rank` on."""
        if size <= 0 or depth == len(rates) or rank == len(rates[depth]):
            return 0.0
        own = rates[depth][rank]
        return max(
            [own * best(part, depth + 1) + below(size - part, depth, rank + 1)
             for part in range(1, size + 1)]
        )  # fmt: skip

    shape = SampledShape.best(rates, nodes)
    assert expected(shape.paths, rates) == pytest.approx(best(nodes + 1, 0))
    # The first so many are the best tree of that size.
    for size in range(1, len(shape.paths)):
        assert expected(shape.paths[:size], rates) == pytest.approx(best(size + 1, 0))


def test_places_are_worth_what_leads_to_them():
    def rule(seen):
        if len(seen) == 1:
            return logits(0.0, 0.9, 0.1)
        return logits(0.0, 0.5, 0.5) if seen[-1] == 1 else logits(0.0, 1.0, 0.0)

    for seed in range(8):
        draft = grown(DynamicSample(nodes=4, depth=2, width=2), rule, [2], seed)[0]
        first = draft.tokens[0]
        if first == 1:
            # Places: 1, then below token 1 (0.9), its sibling there (0.45), and the root's (0.1).
            assert draft.parents == (-1, 0, 0, -1) and draft.tokens[3] == 2
        else:
            # The second sample of the root is worth 0.9, and so is what follows it; below token 2
            # comes 0.1.
            assert draft.tokens[:2] == [2, 1] and draft.parents[:3] == (-1, -1, 1)
        assert torch.equal(draft.probs[0], rule((0,)).softmax(-1))


def test_a_stochastic_beam_samples_paths_without_replacement():
    """The leaves of a beam of two, in order of their scores, are two paths drawn in turn."""
    first = torch.tensor([0.6, 0.3, 0.1])
    second = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])

    def rule(seen):
        return (first if len(seen) == 1 else second[seen[-1]]).log()

    draws: Counter = Counter()
    count = 3000
    asked = GenerationOptions(do_sample=True, top_k=0, seed=1)
    tree = StochasticBeam(width=2, depth=2)
    executable = TableExecutable(rule, program(3, draft=RuleDraft(rule), tree=tree))
    proposer = RuleProposer(RuleDraft(rule), setting(executable))
    proposer.begin([[0]] * count)
    length = LengthPolicy(FixedLength(), executable, count)
    for draft in TREES.find(tree)(tree, asked).grow(proposer, [2] * count, length):
        leaves = [node for node in range(len(draft.tokens)) if draft.depth(node) == 2]
        draws[tuple(tuple(draft.tokens[n] for n in draft.path(leaf)) for leaf in leaves)] += 1
    whole = {
        (a, b): float(first[a] * second[a, b]) for a, b in itertools.product(range(3), repeat=2)
    }
    wanted = {
        (one, two): whole[one] * whole[two] / (1 - whole[one])
        for one, two in itertools.permutations(whole, 2)
        if whole[one] > 0 and whole[two] > 0
    }
    assert_distributed(draws, wanted)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SampledShape(((0, 0),)),
        lambda: SampledShape(((1,),)),
        lambda: SampledShape(((0,), (0,))),
        lambda: SampledShape.chosen(),
        lambda: SampledShape.chosen(nodes=3, accepted=((0.1, 0.2),)),
        lambda: StochasticBeam(width=4096, depth=2),
        lambda: DynamicSample(nodes=0),
    ],
)
def test_impossible_trees_are_refused(make):
    with pytest.raises(InputError):
        make()
