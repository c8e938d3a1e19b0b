"""Speculative Jacobi decoding: guesses of the last step, and what they keep of the distribution."""

from __future__ import annotations

import pytest
import torch
from runtime_models import TableExecutable, markov, plain, program
from test_runtime_sampling import assert_distributed, texts_drawn
from test_runtime_verifiers import LENGTH, PROMPT, RULE, VOCAB, exact
from tiny import MASK, PROMPTS, drafting_llama, named

from graftwork.backends import Target, compile
from graftwork.passes.drafting.jacobi import JacobiDraft
from graftwork.passes.drafting.speculative_jacobi import (
    SpeculativeJacobiDraft,
    SpeculativeJacobiDrafter,
)
from graftwork.runtime import generate
from graftwork.runtime.asking.options import GenerationOptions
from graftwork.runtime.feeding.draft import Draft, VerifiedStep
from graftwork.runtime.speculate.setting import Setting

DRAFT = SpeculativeJacobiDraft(tokens=3)


@pytest.mark.parametrize("size", [(1, 160), (4, 60)], ids=str)
def test_samples_follow_the_models_distribution(size):
    executable = TableExecutable(RULE, program(VOCAB, draft=DRAFT))
    found, accepted, drafted = texts_drawn(executable, PROMPT, LENGTH, size, {})
    assert_distributed(found, exact({}))
    assert 0.05 < accepted / drafted < 0.95


def test_filters_apply():
    options = {"top_k": 3, "top_p": 0.95, "temperature": 1.3}
    executable = TableExecutable(RULE, program(VOCAB, draft=DRAFT))
    found, _, _ = texts_drawn(executable, PROMPT, LENGTH, (200, 2), options)
    assert_distributed(found, exact(options))


def test_wrong_distributions_show(monkeypatch):
    """The test can fail: guesses that were not drawn as the draft says are not lossless."""
    honest = SpeculativeJacobiDrafter._told
    monkeypatch.setattr(
        SpeculativeJacobiDrafter, "_told", lambda self, *args: honest(self, *args).flip(-1)
    )
    executable = TableExecutable(RULE, program(VOCAB, draft=DRAFT))
    found, _, _ = texts_drawn(executable, PROMPT, LENGTH, (300, 2), {})
    with pytest.raises(AssertionError):
        assert_distributed(found, exact({}))


def test_sampled_guesses_are_kept_more_often():
    """Where what follows depends little on the guesses, p is q, and all are kept."""
    flat = markov(12, seed=3, scale=0.3)
    rates = {}
    for draft in (JacobiDraft(tokens=4), SpeculativeJacobiDraft(tokens=4)):
        executable = TableExecutable(flat, program(12, draft=draft))
        asked = {"max_new_tokens": 60, "do_sample": True, "seed": 1, "top_k": 0}
        ids = torch.tensor([[1, 2, 3]])
        result = generate(executable, ids, return_dict_in_generate=True, **asked)
        rates[draft.kind] = result.stats.accepted_per_step
    assert rates["speculative_jacobi"] > rates["jacobi"] + 0.4


def test_greedy_decoding_is_jacobis():
    rule = markov(12, seed=3)
    found = []
    for draft in (JacobiDraft(tokens=4), SpeculativeJacobiDraft(tokens=4)):
        executable = TableExecutable(rule, program(12, draft=draft))
        ids = torch.tensor([[1, 2, 3]])
        result = generate(executable, ids, max_new_tokens=30, return_dict_in_generate=True)
        assert result.sequences[0, 3:].tolist() == plain(rule, [1, 2, 3], 30)
        found.append(result.stats.steps)
    assert found[0] == found[1] < 30


def test_what_is_told_by_hand():
    executable = TableExecutable(RULE, program(4, draft=DRAFT))
    options, nobody = GenerationOptions(do_sample=True, top_k=0, seed=3), None
    drafter = SpeculativeJacobiDrafter(DRAFT, Setting(executable, options, nobody))
    drafter.begin([[0, 1, 2]])
    first = drafter.propose([3])[0]
    assert first.tokens == [0, 1, 2] and torch.equal(first.probs, torch.eye(4)[:3])
    # The first guess was kept, the second was not; after it and the third the target said this.
    logits = torch.tensor([[9.0, 0, 0, 0], [0, 0, 0, 9], [0.1, 0.2, 0.3, 0.4], [3, 2, 1, 0]])
    step = VerifiedStep(
        [Draft([0, 1, 2], first.probs)], [[0]], [[0, 3]], [0], {"logits": logits[None]}
    )
    drafter.observe(step)
    second = drafter.propose([3])[0]
    assert torch.allclose(second.probs[:2], logits[2:].softmax(-1))
    assert second.tokens[2] == 0 and torch.equal(second.probs[2], torch.eye(4)[0])
    assert drafter.propose([1])[0].probs.shape == (1, 4) and not drafter.propose([0])[0].tokens


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_text_is_the_targets_own(backend: str) -> None:
    asked = {"max_new_tokens": 20, "eos_token_id": []}
    bare, fast = (
        compile(drafting_llama(*passes), Target(backend, "cpu"))
        for passes in ([], [named("draft_speculative_jacobi", tokens=4)])
    )
    expected = generate(bare, PROMPTS, attention_mask=MASK, **asked)
    assert torch.equal(generate(fast, PROMPTS, attention_mask=MASK, **asked), expected)
    sampled = {**asked, "do_sample": True, "seed": 4, "attention_mask": MASK}
    result = generate(fast, PROMPTS, return_dict_in_generate=True, **sampled)
    assert result.stats.accepted_tokens > 0
    assert torch.equal(generate(fast, PROMPTS, **sampled), result.sequences)
