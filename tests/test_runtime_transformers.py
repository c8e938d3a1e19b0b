"""`generate` against transformers' own `generate`, over the same weights."""

from __future__ import annotations

import pytest
import torch
from noisy import Multinomial
from runtime_models import TableExecutable, program
from selection import one_in
from small_llama import small_llama
from transformers.generation import StoppingCriteria

from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate

VOCAB, END = 24, 5
DRAFTS = [None, SuffixDraft(tokens=4, shortest=1)]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8, 2, 8]]


@pytest.fixture(scope="module")
def model():
    return small_llama(VOCAB, END)


def executable(model, draft):
    """The model recomputed from the cached tokens; logits shared with nothing else."""

    @torch.no_grad()
    def rule(seen):
        return model(torch.tensor([seen])).logits[0, -1]

    return TableExecutable(rule, program(VOCAB, draft=draft, eos=(END,)), (1, 5, 16))


def batch(pad: int = 1) -> dict[str, torch.Tensor]:
    """PROMPTS as a batch, padded by a token that each of them has: transformers before 5.23
    counts padding as repeated."""
    width = max(map(len, PROMPTS))
    ids = [[pad] * (width - len(p)) + p for p in PROMPTS]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("draft", one_in(2, DRAFTS[::-1]), ids=["suffix", "plain"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 24},
        {"max_length": 20},
        {},
        {"max_new_tokens": 24, "pad_token_id": 7},
        {"max_new_tokens": 24, "eos_token_id": [5, 9, 11], "pad_token_id": 0},
        {"max_new_tokens": 24, "eos_token_id": None},
        {"max_new_tokens": 24, "min_new_tokens": 9},
        {"max_new_tokens": 24, "repetition_penalty": 1.3},
        {"max_new_tokens": 24, "repetition_penalty": 0.8, "min_new_tokens": 4},
    ],
    ids=str,
)
def test_greedy_ragged_batch(model, draft, options):
    expected = model.generate(**batch(), **{"do_sample": False, **options})
    assert torch.equal(generate(executable(model, draft), **batch(), **options), expected)


@pytest.mark.parametrize("draft", DRAFTS, ids=["plain", "suffix"])
def test_padding_is_no_repetition(model, draft):
    """A text is penalised for its own tokens: as alone."""
    options = {"max_new_tokens": 24, "repetition_penalty": 1.3, "eos_token_id": None}
    together = generate(executable(model, draft), **batch(pad=0), **options)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = generate(executable(model, draft), torch.tensor([prompt]), **options)
        assert row[-24:].tolist() == alone[0, -24:].tolist()


@pytest.mark.parametrize("draft", DRAFTS, ids=["plain", "suffix"])
def test_inferred_padding(model, draft):
    inputs = batch(pad=23)
    del inputs["attention_mask"]
    expected = model.generate(**inputs, max_new_tokens=12, pad_token_id=23)
    found = generate(executable(model, draft), **inputs, max_new_tokens=12, pad_token_id=23)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5, "top_p": 0.8},
        {"top_k": None, "min_p": 0.1, "temperature": 1.5},
        {"repetition_penalty": 1.5, "min_new_tokens": 16, "eos_token_id": 5, "top_k": 0},
    ],
    ids=str,
)
def test_samples_are_the_same_draws(model, options, monkeypatch):
    """With one way of drawing a token in both, the sampled texts are equal."""
    drawing = Multinomial()
    monkeypatch.setattr(torch, "multinomial", drawing)
    given = {"do_sample": True, "max_new_tokens": 16, "eos_token_id": None, **options}
    for seed in range(3):
        drawing.manual_seed(seed)
        expected = model.generate(**batch(), **given)
        found = generate(executable(model, None), **batch(), **given, seed=seed)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("draft", DRAFTS, ids=["plain", "suffix"])
def test_stopping_criteria(model, draft):
    class TwoOfAKind(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == input_ids[:, -2]

    given = {"max_new_tokens": 20, "eos_token_id": [5], "pad_token_id": 1}
    expected = model.generate(**batch(), **given, stopping_criteria=[TwoOfAKind()])
    found = generate(executable(model, draft), **batch(), **given, stopping_criteria=TwoOfAKind())
    assert torch.equal(found, expected)
