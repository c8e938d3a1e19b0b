"""Chains with siblings by confidence: exactly the widths of the paper, and the same text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_proposers import RuleProposer, executable, random_rule
from runtime_drafts import RuleDraft
from runtime_models import TableExecutable, markov, plain, program

from graftwork.ir import InputError
from graftwork.ir.plan import Chain, FixedLength, WidenedChain
from graftwork.runtime import generate
from graftwork.runtime.speculate.lengths.base import LengthPolicy
from graftwork.runtime.speculate.trees.widened import WidenedChainPolicy

VOCAB = 12
RULE, OTHER = markov(VOCAB, seed=5), markov(VOCAB, seed=6)


def scored(seen: tuple[int, ...]) -> torch.Tensor:
    """A drafter that is right more often than not; scores are log probabilities."""
    return (2 * RULE(seen) + OTHER(seen)).log_softmax(-1)


def grown(record: WidenedChain, rule, depths: list[int]):
    length = LengthPolicy(FixedLength(), executable(record.most), len(depths))
    return WidenedChainPolicy(record).grow(RuleProposer(rule, len(depths)), depths, length)


@pytest.mark.parametrize(
    ("sure", "width"), [(0.1, 7), (0.3, 7), (0.31, 5), (0.6, 5), (0.7, 3), (0.8, 3), (0.81, 1)]
)
def test_the_papers_widths(sure: float, width: int) -> None:
    def rule(sequence, path):
        return [(token, float(np.log(sure))) for token in range(9)]

    (draft,) = grown(WidenedChain(depth=2), rule, [2])
    assert draft.tokens == [*range(width)] * 2
    assert draft.parents == (*[-1] * width, *[0] * width)


def test_only_the_chain_is_predicted_further_and_levels_end_where_they_may() -> None:
    rule = random_rule(VOCAB, 5, seed=3)
    record = WidenedChain(depth=4, bounds=(0.2, 0.4), counts=(4, 2, 1))
    depths = [4, 0, 2, 1]
    for index, draft in enumerate(grown(record, rule, depths)):
        path: tuple[int, ...] = ()
        wanted, parents, above = [], [], -1
        for _ in range(depths[index]):
            known = rule(index, path)
            if not known:
                break
            bound = np.exp(np.float32(known[0][1])) - 1e-6
            width = record.counts[int(np.searchsorted(record.bounds, bound))]
            tokens = [token for token, _ in known[:width]]
            parents += [above] * len(tokens)
            above = len(wanted)
            wanted += tokens
            path = (*path, tokens[0])
        assert list(draft.tokens) == wanted
        assert not wanted or draft.parents == tuple(parents)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_same_text_and_more_of_it_a_step_than_a_chain(batch: int, do_sample: bool) -> None:
    prompts = torch.tensor([[0, 1, b] for b in range(batch)])
    options = {"do_sample": True, "seed": 1, "temperature": 0.7} if do_sample else {}
    gains = {}
    for tree in (Chain(depth=4), WidenedChain(depth=4)):
        model = program(VOCAB, draft=RuleDraft(scored), tree=tree)
        result = generate(
            TableExecutable(RULE, model),
            prompts,
            max_new_tokens=40,
            return_dict_in_generate=True,
            **options,
        )
        if not do_sample:
            rows = result.sequences.tolist()
            assert rows == [[*p, *plain(RULE, p, 40)] for p in prompts.tolist()]
        gains[tree.kind] = result.stats.accepted_per_step
    assert gains["widened"] > gains["chain"] > 1


def test_bad_widths_are_refused() -> None:
    with pytest.raises(InputError, match=r"widened: \(0, 1, 1, 1\) is not a valid counts"):
        WidenedChain(counts=(0, 1, 1, 1))
    for bad in ({"bounds": (0.6, 0.3, 0.8)}, {"counts": (1, 2)}):
        with pytest.raises(InputError, match="widened chain: expected bounds that rise"):
            WidenedChain(**bad)
