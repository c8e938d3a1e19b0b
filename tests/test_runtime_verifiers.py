"""Verifiers: lossless ones keep the target's distribution whatever the tree; others relax."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from runtime_drafts import RuleDraft
from runtime_models import TableExecutable, markov, plain, program
from selection import one_in
from test_runtime_sampling import assert_distributed, texts_drawn, theirs_warped
from tiny import tiny_llama

from graftwork.backends import Target, compile
from graftwork.ir import InputError, UnsupportedError
from graftwork.ir.plan import (
    Chain,
    DecodePlan,
    Lossless,
    Record,
    SampledTree,
    SpecTr,
    StaticTree,
    TopKAccept,
    TreeRecord,
    Typical,
    WidenedChain,
)
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.asking.options import read_options
from graftwork.runtime.asking.text import Text
from graftwork.runtime.feeding.draft import Draft
from graftwork.runtime.speculate.sampling import StepToVerify
from graftwork.runtime.speculate.trees.sampled import _distinct, _independent
from graftwork.runtime.speculate.verifiers import spectr
from graftwork.runtime.speculate.verifiers.base import GREEDY, SAMPLING, VERIFIERS, Verdict

VOCAB, LENGTH, PROMPT = 4, 4, [0, 1, 2, 0]
RULE = markov(VOCAB, seed=5, scale=1.4)
OTHER = markov(VOCAB, seed=6)
DRAFT = RuleDraft(lambda seen: RULE(seen) / 3 + OTHER(seen))
BOTH = {"top_k": 3, "top_p": 0.95}

FIXED = StaticTree.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
DISTINCT, INDEPENDENT = SampledTree((3, 2)), SampledTree((3, 2), replacement=True)


def exact(options: dict[str, float]) -> dict[tuple[int, ...], float]:
    """Probability of every continuation."""
    found = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for count, token in enumerate(tokens):
            seen = (*PROMPT, *tokens[:count])
            chance *= float(theirs_warped(RULE(seen)[None], options)[0, token])
        found[tokens] = chance
    return found


def sample(
    draft: RuleDraft,
    tree: TreeRecord,
    verify: Record,
    size: tuple[int, int],
    options: dict[str, float],
) -> tuple[Counter, float]:
    """Continuations of `size` = (batch, calls) and the share of draft tokens that were kept."""
    executable = TableExecutable(RULE, program(VOCAB, draft=draft, tree=tree, verify=verify))
    drawn, accepted, drafted = texts_drawn(executable, PROMPT, LENGTH, size, options)
    return drawn, accepted / drafted


LOSSLESS: dict[str, tuple[TreeRecord, Record]] = {
    "chain": (Chain(depth=2), Lossless()),
    "widened chain": (WidenedChain(2, (0.4, 0.7), (3, 2, 1)), Lossless()),
    "sampled chain": (SampledTree((1, 1)), Lossless()),
    "spectr chain": (SampledTree((1, 1), replacement=True), SpecTr()),
    "static tree": (FIXED, Lossless()),
    "distinct siblings": (DISTINCT, Lossless()),
    "independent siblings": (INDEPENDENT, Lossless()),
    "spectr tree": (INDEPENDENT, SpecTr()),
}
SIZES = [(1, 120), (4, 50)]


@pytest.mark.parametrize(("name", "size"), one_in(3, product(LOSSLESS, SIZES)), ids=str)
def test_samples_follow_the_models_distribution(name, size):
    tree, verify = LOSSLESS[name]
    drawn, rate = sample(DRAFT, tree, verify, size, {})
    assert_distributed(drawn, exact({}))
    # The test says something about drafts only if some are kept and some are not.
    assert 0.05 < rate < 0.95


@pytest.mark.parametrize("name", ["distinct siblings", "independent siblings", "spectr tree"])
def test_filters_apply_to_draft_and_target(name):
    tree, verify = LOSSLESS[name]
    options = {**BOTH, "temperature": 1.3}
    drawn, rate = sample(DRAFT, tree, verify, (200, 2), options)
    assert_distributed(drawn, exact(options))
    assert 0.05 < rate < 0.95


@pytest.mark.parametrize("name", ["distinct siblings", "spectr tree"])
def test_a_seed_repeats_and_does_not_tie_the_verifier_to_the_draft(name):
    """Were each given a generator of its own with that seed, their draws would be alike."""
    tree, verify = LOSSLESS[name]
    model = program(VOCAB, draft=DRAFT, tree=tree, verify=verify)
    executable, ids = TableExecutable(RULE, model), torch.tensor([PROMPT] * 2)

    def continued(seed: int) -> torch.Tensor:
        return generate(executable, ids, max_new_tokens=30, do_sample=True, seed=seed)

    assert torch.equal(continued(7), continued(7)) and not torch.equal(continued(7), continued(8))
    options = read_options({"do_sample": True, "seed": 7}, model.info)
    assert options.random() is options.random() is not None
    given = torch.Generator()
    assert read_options({"do_sample": True, "generator": given}, model.info).random() is given


@pytest.mark.parametrize("name", ["sampled chain", "distinct siblings", "spectr tree"])
def test_wrong_distributions_show(name, monkeypatch):
    """The tests can fail: tokens that were not sampled as the draft says are not lossless."""
    tree, verify = LOSSLESS[name]

    def lying(self, chances, width):
        return honest(self, chances._replace(probs=chances.probs[:, ::-1].copy()), width)

    from graftwork.runtime.speculate.trees.sampled import SampledTreePolicy

    honest = SampledTreePolicy._siblings
    monkeypatch.setattr(SampledTreePolicy, "_siblings", lying)
    drawn, _ = sample(DRAFT, tree, verify, (300, 2), {})
    with pytest.raises(AssertionError):
        assert_distributed(drawn, exact({}))


# -- the verifier alone, on many sequences --------------------------------------------------------

MANY = 2000


def siblings(q: torch.Tensor, count: int, independent: bool, seed: int) -> list[list[int]]:
    """`count` children of the root for each of many sequences."""
    generator = torch.Generator().manual_seed(seed)
    pick = _independent if independent else _distinct
    places = pick(q.double().expand(MANY, -1), count, generator)
    return [[token for token in row if token >= 0] for row in places.tolist()]


def judged(
    verify: Record, logits: torch.Tensor, drafts: Sequence[Draft], options: dict[str, float]
) -> list[Verdict]:
    """The verdict on each of the sequences. logits: [N+1,V], the same for all."""
    model = program(logits.shape[-1])
    asked = read_options({"do_sample": True, "seed": 12, **options}, model.info)
    verifier = VERIFIERS.find(verify, SAMPLING)(verify, model, asked, len(drafts))
    texts = [Text([0], 1, 9) for _ in drafts]
    outputs = {"logits": logits.expand(len(drafts), -1, -1)}
    return verifier.verify(StepToVerify(outputs, texts, drafts))


def spread(kind: str, vocab: int, seed: int) -> torch.Tensor:
    """A distribution f32[V]: a flat one, a peaked one or one that lacks half of the tokens."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    if kind == "peaked":
        logits = logits * 6
    if kind == "gaps":
        logits[::2] = -torch.inf
    return logits.softmax(-1)


@pytest.mark.parametrize(
    ("kind", "options"),
    one_in(2, [("peaked", {}), ("flat", {}), ("gaps", {"top_k": 4, "top_p": 0.9})]),
)
@pytest.mark.parametrize(
    ("verify", "independent"),
    [(Lossless(), False), (Lossless(), True), (SpecTr(), False), (SpecTr(), True)],
    ids=["distinct", "independent", "spectr on distinct", "spectr"],
)
def test_a_node_keeps_the_distribution(verify, independent, kind, options):
    """The first token follows p, and more siblings are accepted than one alone would be."""
    q, logits = spread(kind, 6, 1), torch.randn(4, 6, generator=torch.Generator().manual_seed(4))
    p = theirs_warped(logits[:1], {"top_k": 50, **options})[0]
    rates = {}
    for count in (1, 3):
        rows = siblings(q, count, independent, seed=count)
        drafts = [Draft(row, q.expand(len(row), -1), (-1,) * len(row), independent) for row in rows]
        results = [verdict.tokens for verdict in judged(verify, logits, drafts, options)]
        drawn = Counter((tokens[0],) for tokens in results)
        assert_distributed(drawn, {(t,): float(chance) for t, chance in enumerate(p)})
        rates[count] = sum(len(tokens) == 2 for tokens in results) / MANY
        assert all(len(g) == 1 or g[0] in row for g, row in zip(results, rows, strict=True))
    overlap = float(torch.minimum(p, q).sum())
    assert abs(rates[1] - overlap) < 4.5 * (overlap * (1 - overlap) / MANY) ** 0.5 + 1e-9
    assert rates[3] > rates[1] + 0.02


@pytest.mark.parametrize("verify", [Lossless(), SpecTr()], ids=str)
def test_deeper_levels_keep_the_distribution(verify):
    """Given an accepted first token, the second follows the row after its node."""
    q = spread("flat", 5, 3)
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(4))
    parents = (-1, -1, 0, 0, 1, 1)
    first, second, third = (siblings(q, 2, True, seed) for seed in (5, 6, 7))
    drafts = [
        Draft([*a, *b, *c], q.expand(6, -1), parents, True)
        for a, b, c in zip(first, second, third, strict=True)
    ]
    results = judged(verify, logits, drafts, {})
    # Which of two twins is on the path depends on what follows them.
    apart = [v for v, draft in zip(results, drafts, strict=True) if len({*draft.tokens[:2]}) == 2]
    for node in (0, 1):
        reached = [verdict.tokens for verdict in apart if node in verdict.path]
        drawn = Counter((tokens[1],) for tokens in reached)
        p = logits[node + 1].softmax(-1)
        assert len(reached) > 150
        assert_distributed(drawn, {(t,): float(chance) for t, chance in enumerate(p)})


@pytest.mark.parametrize("verify", [Lossless(), SpecTr()], ids=str)
def test_what_follows_twins_is_judged_together(verify):
    """Two paths that begin alike: where the first one's next token fails, the second's may do."""
    q = torch.tensor([0.25, 0.25, 0.25, 0.25])
    sure = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    logits = torch.tensor([sure[0], sure[1], sure[1], sure[1], sure[1]]).log()
    for tokens, path in (([1, 1, 2, 3], [1, 3]), ([1, 1, 3, 2], [0, 2]), ([2, 1, 3, 0], [1])):
        draft = Draft(tokens, q.expand(4, -1), (-1, -1, 0, 1), True)
        (verdict,) = judged(verify, logits, [draft], {})
        assert list(verdict.path) == path
        assert verdict.tokens == [tokens[node] for node in path] + [3]


@pytest.mark.parametrize("verify", [Lossless(), SpecTr()], ids=str)
def test_paths_that_may_begin_alike_keep_the_distribution(verify):
    tree = SampledTree((3, 1, 1), replacement=True)
    drawn, rate = sample(DRAFT, tree, verify, (200, 2), {})
    assert_distributed(drawn, exact({}))
    assert 0.05 < rate < 0.95


def test_siblings_that_repeat_are_not_distinct():
    """The tests can fail: independent siblings judged as distinct ones, and a greedier rho."""
    q, logits = (
        spread("peaked", 6, 1),
        torch.randn(4, 6, generator=torch.Generator().manual_seed(2)),
    )
    rows = siblings(q, 3, True, seed=3)
    drafts = [Draft(row, q.expand(3, -1), (-1, -1, -1), False) for row in rows]
    drawn = Counter((verdict.tokens[0],) for verdict in judged(Lossless(), logits, drafts, {}))
    p = logits[0].softmax(-1)
    with pytest.raises(AssertionError):
        assert_distributed(drawn, {(t,): float(chance) for t, chance in enumerate(p)})


def test_siblings_follow_their_distribution():
    """Without replacement: pairs come up as when drawn one after the other."""
    q = spread("gaps", 8, 9)
    pairs = Counter(tuple(row) for row in siblings(q, 2, False, seed=1))
    expected = {
        (a, b): float(q[a] * q[b] / (1 - q[a]))
        for a, b in itertools.permutations(range(8), 2)
        if q[a] > 0 and q[b] > 0
    }
    assert_distributed(pairs, expected)
    twice = Counter(tuple(row) for row in siblings(q, 2, True, seed=1))
    both = {(a, b): float(q[a] * q[b]) for a in range(8) for b in range(8)}
    assert_distributed(twice, {pair: chance for pair, chance in both.items() if chance > 0})
    # Four tokens have a chance: there is no fifth to draw without replacement.
    assert {len(row) for row in siblings(q, 6, False, seed=2)} == {4}


def test_selection_is_the_best_that_is_lossless():
    random = np.random.default_rng(0)
    for count in (2, 3, 5):
        for _ in range(20):
            p, q = random.dirichlet(np.ones(7)), random.dirichlet(np.ones(7) * 0.3)
            rho, rest = spectr.selection(p, q, count)
            shared = np.minimum(q, p / rho)
            b = shared.sum()
            some = 1 - (1 - b) ** count
            assert 1 <= rho <= count and some <= rho * b + 1e-9
            assert some == pytest.approx(rho * b, abs=1e-5)  # no smaller rho would do
            np.testing.assert_allclose(some / b * shared + rest, p, atol=1e-9)
            # Sun et al.: within 1 - 1/e of the best that any verifier of k siblings can do.
            assert some >= (1 - np.exp(-1)) * min(1.0, np.minimum(p, count * q).sum()) - 1e-9
    rho, rest = spectr.selection(np.array([1.0, 0.0]), np.array([0.0, 1.0]), 3)
    np.testing.assert_allclose(rest, [1.0, 0.0])


def test_a_drafter_without_distributions_cannot_be_sampled():
    draft = RuleDraft(DRAFT.rule, said=False)
    executable = TableExecutable(RULE, program(VOCAB, draft=draft, tree=DISTINCT))
    ids = torch.tensor([PROMPT])
    with pytest.raises(UnsupportedError, match="whole distributions"):
        generate(executable, ids, max_new_tokens=6, do_sample=True)
    # Greedy decoding samples nothing.
    result = generate(executable, ids, max_new_tokens=6)
    assert result[0, len(PROMPT) :].tolist() == plain(RULE, PROMPT, 6)


@pytest.mark.parametrize("verify", [Lossless(), SpecTr()], ids=str)
@pytest.mark.parametrize("tree", [DISTINCT, INDEPENDENT], ids=str)
def test_greedy_is_deterministic(verify, tree):
    executable = TableExecutable(RULE, program(VOCAB, draft=DRAFT, tree=tree, verify=verify))
    for _ in range(2):
        torch.manual_seed(1)
        result = generate(executable, torch.tensor([PROMPT]), max_new_tokens=20)
        assert result[0, len(PROMPT) :].tolist() == plain(RULE, PROMPT, 20)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        assert torch.equal(state, torch.get_rng_state()), "greedy decoding drew random numbers"


@pytest.mark.parametrize("widths", [(), (2, 0), (-1,)])
def test_impossible_widths_are_refused(widths):
    with pytest.raises(InputError, match="widths"):
        SampledTree(widths)


@pytest.mark.parametrize("verify", [Lossless(), SpecTr()], ids=str)
def test_heads_may_be_sampled(verify):
    """A real drafter: heads give whole distributions, and greedy text stays the target's own."""
    target = tiny_llama(context=48)
    for step in (DraftMedusa(heads=2), InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax()):
        target = step.run(target).program
    tree = SampledTree((3, 2), replacement=isinstance(verify, SpecTr))
    planned = target.replace(plan=replace(target.plan, tree=tree, verify=verify))
    target = target.replace(plan=DecodePlan())
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    plainly, drafted = (compile(p, Target.parse("eager")) for p in (target, planned))

    def text(executable, **options):
        return generate(
            executable, ids, max_new_tokens=20, eos_token_id=None, pad_token_id=0, **options
        )

    assert torch.equal(text(drafted), text(plainly))
    sampled = text(drafted, do_sample=True, seed=5)
    assert torch.equal(sampled, text(drafted, do_sample=True, seed=5))
    assert not torch.equal(sampled, text(drafted))


# -- relaxed verifiers ----------------------------------------------------------------------------

ROOT = [0.4, 0.35, 0.2, 0.05]
SURE = [0.9, 0.06, 0.03, 0.01]


def verdicts(verify: Record, rows: list[list[float]], draft: Draft, trait: str, **options):
    model = program(len(rows[0]))
    asked = read_options({"do_sample": trait == SAMPLING, **options}, model.info)
    verifier = VERIFIERS.find(verify, trait)(verify, model, asked, 2)
    logits = torch.tensor(rows).log()[None].expand(2, -1, -1)
    texts = [Text([0], 1, 9), Text([0, 0], 1, 9, done=True)]
    return verifier.verify(StepToVerify({"logits": logits}, texts, [draft, Draft(())]))


@pytest.mark.parametrize("trait", [GREEDY, SAMPLING])
@pytest.mark.parametrize(
    ("verify", "tokens", "kept"),
    [
        # entropy 1.20: 0.3 * exp(-1.20) = 0.09; the floor of 0.09 is a little lower
        (Typical(), [2], 1),
        (Typical(), [3], 0),
        (Typical(floor=0.04, share=0.3), [3], 1),
        (Typical(floor=0.5, share=1.0), [1], 1),  # exp(-entropy) = 0.30
        (Typical(floor=0.5, share=1.0), [2], 0),
        (Typical(floor=1.0, share=1.0), [0], 1),
        # after the root all are sure: entropy 0.42, 0.3 * exp(-0.42) = 0.2 > 0.09
        (Typical(), [1, 0], 2),
        (Typical(), [1, 1], 1),
        (TopKAccept(2), [1, 1, 1], 3),
        (TopKAccept(2), [2], 0),
        (TopKAccept(3), [2, 2], 2),
        (TopKAccept(9), [3, 3], 2),
        (TopKAccept(1), [0, 0, 1], 2),
    ],
    ids=str,
)
def test_relaxed_verifiers_accept_what_they_say(verify, tokens, kept, trait):
    rows = [ROOT, *[SURE] * len(tokens)]
    live, done = verdicts(verify, rows, Draft(tokens), trait)
    assert list(live.path) == list(range(kept)) and live.tokens[:-1] == tokens[:kept]
    assert len(live.tokens) == kept + 1 and done.tokens == []
    if trait == GREEDY:
        assert live.tokens[-1] == 0


@pytest.mark.parametrize("verify", [Typical(), TopKAccept(3)], ids=str)
def test_the_longest_and_likeliest_path_wins(verify):
    #       0      1         2
    #      / \     |
    #     3   4    5         (5 and 4 continue equally well; node 1 is less likely than node 0)
    draft = Draft([0, 1, 2, 3, 0, 0], None, (-1, -1, -1, 0, 0, 1))
    rows = [ROOT, *[SURE] * 6]
    live, _ = verdicts(verify, rows, draft, GREEDY)
    assert live.path == [0, 4] and live.tokens == [0, 0, 0]
    # Length counts before likelihood.
    draft = Draft([0, 1, 0], None, (-1, -1, 1))
    live, _ = verdicts(verify, rows[:4], draft, GREEDY)
    assert live.path == [1, 2]


@pytest.mark.parametrize("verify", [Typical(), TopKAccept(2)], ids=str)
def test_relaxed_sampling_without_a_draft_is_plain_sampling(verify):
    verdicts = judged(verify, torch.tensor([ROOT]).log(), [Draft(())] * MANY, {})
    drawn = Counter((verdict.tokens[0],) for verdict in verdicts)
    assert_distributed(drawn, {(t,): chance for t, chance in enumerate(ROOT)})


@pytest.mark.parametrize("verify", [Typical(), TopKAccept(2)], ids=str)
@pytest.mark.parametrize(
    "tree", [Chain(depth=3), FIXED, SampledTree((1, 1, 1))], ids=["chain", "fixed", "sampled"]
)
@pytest.mark.parametrize(("do_sample", "batch"), one_in(3, product([False, True], [1, 3])))
def test_relaxed_verifiers_run_and_keep_more(verify, tree, do_sample, batch):
    def steps(verify):
        executable = TableExecutable(RULE, program(VOCAB, draft=DRAFT, tree=tree, verify=verify))
        options = {"seed": 3} if do_sample else {}
        return generate(
            executable,
            torch.tensor([[0, 1, b] for b in range(batch)]),
            max_new_tokens=40,
            do_sample=do_sample,
            return_dict_in_generate=True,
            **options,
        ).stats.accepted_per_step

    assert steps(verify) > steps(Lossless())


@pytest.mark.parametrize("make", [lambda: Typical(floor=0.0), lambda: Typical(share=1.5)])
def test_typical_refuses_bounds_that_are_none(make):
    with pytest.raises(InputError, match="typical"):
        make()


def test_top_k_refuses_none():
    with pytest.raises(InputError, match="top_k"):
        TopKAccept(0)
