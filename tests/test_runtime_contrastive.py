"""Contrastive decoding: the target against the drafter, exactly as defined, on any tree."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from runtime_drafts import RuleDraft
from runtime_models import TableExecutable, markov, plain, program
from test_runtime_sampling import assert_distributed

from graftwork.ir import InputError, UnsupportedError
from graftwork.ir.plan import Contrastive, SampledTree
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate
from graftwork.runtime.speculate.verifiers.contrastive import contrasted

VOCAB = 6
RULE, OTHER = markov(VOCAB, seed=5), markov(VOCAB, seed=6)
DRAFT = RuleDraft(lambda seen: RULE(seen) + OTHER(seen) / 2)
PROMPTS = torch.tensor([[0, 1, 2], [3, 1, 0], [4, 4, 5], [2, 5, 1], [5, 0, 4]])
TREES = [SampledTree((1, 1, 1), told=True), SampledTree((3, 2), told=True)]


def decode(verify, tree=TREES[0], draft=DRAFT, prompts=PROMPTS, count=30, **options):
    executable = TableExecutable(RULE, program(VOCAB, draft=draft, tree=tree, verify=verify))
    options = {"max_new_tokens": count, "return_dict_in_generate": True, **options}
    return generate(executable, prompts, **options)


def reference(beta: float, plausible: float, prompt: list[int], count: int):
    """Greedy: the target's own first token, and then the contrasted best one everywhere."""
    seen = [*prompt, int(RULE(tuple(prompt)).argmax())]
    while len(seen) < len(prompt) + count:
        strong, weak = RULE(tuple(seen)).softmax(-1), DRAFT.rule(tuple(seen)).softmax(-1)
        scores = (1 + beta) * strong.log() - beta * weak.log()
        scores[strong < plausible * strong.max()] = -torch.inf
        seen.append(int(scores.argmax()))
    return seen[len(prompt) :]


@pytest.mark.parametrize("beta", [0.5, 2.0])
@pytest.mark.parametrize(
    "tree", [*TREES, SampledTree((1,), told=True)], ids=["chain", "tree", "one"]
)
def test_greedy_decoding_follows_the_definition(tree: SampledTree, beta: float) -> None:
    """Every token, those behind a draft that was kept whole and a text's last ones included, so
    that the text does not depend on the draft's shape."""
    result, changed = decode(Contrastive(beta, 0.1), tree), 0
    for row, prompt in zip(result.sequences.tolist(), PROMPTS.tolist(), strict=True):
        wanted = reference(beta, 0.1, prompt, 30)
        assert row[3:] == wanted
        changed += wanted != plain(RULE, prompt, 30)
    assert changed
    assert beta > 1 or tree.depth == 1 or result.stats.accepted_tokens > 0


@pytest.mark.parametrize("tree", TREES, ids=["chain", "tree"])
def test_beta_0_and_sure_targets_are_the_exact_text(tree) -> None:
    for verify in (Contrastive(0.0), Contrastive(3.0, plausible=1.0)):
        rows = decode(verify, tree).sequences.tolist()
        assert rows == [[*p, *plain(RULE, p, 30)] for p in PROMPTS.tolist()]


@pytest.mark.long
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_sampling_follows_the_contrasted_distribution(levels: int) -> None:
    """The first token is the target's own; the third comes behind a draft's first node, with
    levels=2 the last one that has a child, and with levels=1 in a step of its own."""
    many, before = 6000, (2, 3)
    record = Contrastive(0.8, 0.05)
    tree = SampledTree((1,) * levels, told=True)
    executable = TableExecutable(RULE, program(VOCAB, draft=DRAFT, tree=tree, verify=record))
    prompts = torch.tensor([[0, 1]]).repeat(many, 1)
    rows = generate(executable, prompts, max_new_tokens=4, do_sample=True, top_k=0, seed=1)
    for place in (3, 4, 5):
        seen = (0, 1, *before[: place - 2])
        drawn: Counter[tuple[int, ...]] = Counter()
        found = [row for row in rows.tolist() if tuple(row[2 : len(seen)]) == seen[2:]]
        drawn.update((row[len(seen)],) for row in found if len(row) > len(seen))
        weak = DRAFT.rule(seen).softmax(-1).numpy()
        shares = contrasted(record, RULE(seen).softmax(-1).numpy(), weak)
        assert_distributed(drawn, {(t,): float(share) for t, share in enumerate(shares)})


def test_filters_leave_their_candidates() -> None:
    rows = decode(Contrastive(0.5), do_sample=True, top_k=2, seed=0).sequences
    for row in rows.tolist():
        for end in range(3, len(row)):
            assert row[end] in RULE(tuple(row[:end])).topk(2).indices.tolist()


def test_where_the_drafter_says_nothing() -> None:
    """A token that a filter took from q counts as q's least likely one, and not as impossible."""
    shares = contrasted(Contrastive(1.0, 0.0), np.array([0.5, 0.5]), np.array([1.0, 0.0]))
    assert shares.tolist() == [0.5, 0.5]


def test_refusals() -> None:
    for bad in ({"beta": -0.1}, {"plausible": 1.5}):
        with pytest.raises(InputError, match=r"contrastive: .* is not a valid (beta|plausible)"):
            Contrastive(**bad)
    for untold in ({"tree": SampledTree((1, 1))}, {"draft": SuffixDraft(shortest=1)}):
        with pytest.raises(UnsupportedError, match="has no distributions to weigh against"):
            decode(Contrastive(), **untold)
    blind = RuleDraft(DRAFT.rule, said=False)
    with pytest.raises(UnsupportedError, match="needs whole distributions"):
        decode(Contrastive(), draft=blind)
