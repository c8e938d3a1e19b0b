"""What `generate` refuses, by name and with numbers, before anything runs."""

from __future__ import annotations

import pytest
import torch
from runtime_models import TableExecutable, program, whole

from graftwork.ir import InputError
from graftwork.runtime import generate

IDS = torch.tensor([[1, 2, 3]])


class Untouched(TableExecutable):
    """Fails if the model runs although the request is bad."""

    def begin(self, batch, rows):
        raise AssertionError("the model ran")


def refuse(match: str, ids: object = IDS, **options: object) -> None:
    with pytest.raises(InputError, match=match):
        generate(Untouched(whole(11), program(11, context=16, eos=(4,))), ids, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_new_token": 3}, r"max_new_token=3; nearest: max_new_tokens"),
        ({"num_beams": 2, "num_return_sequences": 3}, "expected at most num_beams=2"),
        ({"stop_strings": ["x"]}, "stop_strings: table came without a tokenizer.json; give"),
        ({"stop_strings": [""]}, "stop_strings: expected a text, or a list of texts, none"),
        ({"bad_words_ids": [[11]]}, "bad_words_ids: expected a token id below the vocabulary"),
        ({"sequence_bias": {(1, 12): 1.0}}, "sequence_bias: expected a token id below"),
        ({"sequence_bias": {(1,): "a"}}, "sequence_bias: expected {.token ids.: bias}"),
        ({"exponential_decay_length_penalty": 3}, r"expected \(start, factor\)"),
        ({"watermarking_config": {"ngram_len": 5, "keys": [1]}}, "expected .* WatermarkingConfig"),
        ({"watermarking_config": {"hue": 5}}, "watermarking_config: .*hue"),
        ({"generation_config": 5}, "generation_config: expected .* GenerationConfig, or a mapping"),
        ({"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn: expected a function"),
        ({"top_h": 1.5, "do_sample": True}, "top_h: expected a number above 0 to 1"),
        ({"regex": "a", "grammar": "start: /a/"}, "both regex and grammar are given; give one"),
        ({"regex": 5}, "regex: expected text, got 5"),
        ({"json_schema": [1]}, "json_schema: expected a JSON schema, as a dict or its text"),
        ({"json_schema": {}}, "json_schema: table came without a tokenizer.json; give tokenizer="),
        ({"max_time": -1}, "max_time: expected a number from 0"),
        ({"assistant_model": object()}, "a recipe with a drafter"),
        ({"logits_processor": torch.zeros(2)}, "logits_processor: expected a function"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer of at least 1, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens: expected an integer"),
        ({"max_new_tokens": True}, "max_new_tokens: expected an integer"),
        ({"max_new_tokens": 2, "max_length": 9}, "both max_new_tokens and max_length"),
        ({"max_length": 3}, "max_length=3 leaves no room: the prompt is 3 wide"),
        ({"max_new_tokens": 14}, "3 prompt tokens . 14 new tokens exceed .* 16 tokens: at most 13"),
        ({"max_length": 17}, "3 prompt tokens . 14 new tokens exceed"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens=3 is more than the 2"),
        ({"do_sample": 1}, "do_sample: expected True or False, got 1"),
        (
            {"do_sample": True, "temperature": 0.0},
            "temperature: expected a number above 0, got 0.0",
        ),
        ({"do_sample": True, "temperature": float("nan")}, "temperature: expected"),
        ({"do_sample": True, "top_p": 1.5}, "top_p: expected a number from 0 to 1, got 1.5"),
        ({"do_sample": True, "top_k": -1}, "top_k: expected an integer of at least 0"),
        ({"do_sample": True, "min_p": "a"}, "min_p: expected a number"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 has no effect on greedy"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number above 0"),
        ({"eos_token_id": 11}, "eos_token_id: expected a token id below the vocabulary size 11"),
        ({"eos_token_id": [1, -1]}, "eos_token_id: expected an integer of at least 0, got -1"),
        ({"pad_token_id": -100}, "pad_token_id: expected"),
        ({"stop": "abc"}, "stop: expected a list of lists of token ids"),
        ({"stop": [5]}, "stop: expected a list of non-empty lists"),
        ({"stop": [[]]}, "stop: expected a list of non-empty lists"),
        ({"stopping_criteria": 5}, "stopping_criteria: expected a function"),
        ({"streamer": object()}, "streamer: expected an object with put and end"),
        ({"generator": 5}, "generator: expected a torch.Generator on the CPU"),
        ({"generator": torch.Generator(), "seed": 1}, "both generator and seed"),
        ({"attention_mask": [[1, 1, 1]]}, r"attention_mask: expected a tensor"),
        ({"attention_mask": torch.ones(1, 2)}, r"shape of input_ids \[1, 3\], got \[1, 2\]"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "sequence 0 has padding inside its text"),
        ({"attention_mask": torch.zeros(1, 3)}, "sequence 0 is empty"),
    ],
)
def test_bad_options(options, match):
    refuse(match, **options)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([[1, 2]], r"expected a tensor i64\[B,S\], got list"),
        (torch.tensor([1, 2]), r"expected i64\[B,S\], got torch.int64 of shape \[2\]"),
        (torch.tensor([[1.0]]), "got torch.float32"),
        (torch.tensor([[1]], dtype=torch.int32), "got torch.int32"),
        (torch.zeros(1, 0, dtype=torch.int64), r"at least one token, got shape \[1, 0\]"),
        (torch.zeros(0, 3, dtype=torch.int64), r"at least one sequence"),
        (torch.tensor([[1, 2], [3, 11]]), "sequence 1 holds the token id 11; expected 0 to 10"),
        (torch.tensor([[-1, 2]]), "sequence 0 holds the token id -1"),
        (torch.ones(1, 16, dtype=torch.int64), "the prompt has 16 tokens.*context 16"),
        (torch.ones(1, 40, dtype=torch.int64), "the prompt has 40 tokens"),
    ],
)
def test_bad_prompts(ids, match):
    refuse(match, ids)


def test_a_batch_that_needs_a_pad_token_says_so():
    model = program(11)
    with pytest.raises(InputError, match="give pad_token_id"):
        generate(Untouched(whole(11), model), torch.tensor([[1], [2]]), stop=[[3]])


def run(ids: torch.Tensor, pad: int | None = None, **options: object) -> torch.Tensor:
    model = program(11, context=16, eos=(4,), pad=pad)
    return generate(TableExecutable(whole(11), model), ids, **options)


def test_neutral_values_of_other_keywords_are_accepted():
    plain = run(IDS, max_new_tokens=5)
    same = run(IDS, max_new_tokens=5, num_beams=1, use_cache=True, typical_p=1.0, stop_strings=None)
    assert torch.equal(plain, same)
    assert torch.equal(plain, run(IDS, max_length=8, temperature=1.0, top_k=50, seed=None))


def test_default_length_is_what_the_context_leaves():
    assert run(IDS, eos_token_id=None).shape == (1, 16)
    model = program(11, context=99)
    assert generate(TableExecutable(whole(11), model), IDS).shape == (1, 23)


def test_padding_is_invisible_whatever_it_holds():
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    padded = torch.tensor([[-100, 99, 1, 2, 3]])
    result = run(padded, attention_mask=mask, max_new_tokens=6)
    assert torch.equal(result[:, 2:], run(IDS, max_new_tokens=6))
    assert torch.equal(result[:, :5], padded)
    assert torch.equal(result, run(padded, attention_mask=mask.bool(), max_new_tokens=6))


def test_padding_on_the_right_is_moved():
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
    ids = torch.tensor([[1, 2, 3, 99, 99], [99, 5, 6, 7, 8], [99, 1, 2, 3, 99]])
    moved = run(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0)
    assert moved[:, :5].tolist() == [[99, 99, 1, 2, 3], [99, 5, 6, 7, 8], [99, 99, 1, 2, 3]]
    left = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    given = {"attention_mask": left, "max_new_tokens": 6, "pad_token_id": 0}
    assert torch.equal(moved, run(moved[:, :5], **given))


def test_leading_pad_tokens_are_padding_unless_they_end_sequences():
    ids = torch.tensor([[7, 7, 1, 2, 3]])
    assert torch.equal(run(ids, pad=7, max_new_tokens=6)[:, 2:], run(IDS, max_new_tokens=6))
    assert not torch.equal(run(ids, max_new_tokens=6)[:, 2:], run(IDS, max_new_tokens=6))
    inside = torch.tensor([[7, 1, 7, 3]])
    unpadded = run(inside[:, 1:], max_new_tokens=6, eos_token_id=[])
    assert torch.equal(run(inside, pad=7, max_new_tokens=6, eos_token_id=[])[:, 1:], unpadded)
    with_end = run(ids, pad=7, eos_token_id=7, max_new_tokens=6)
    whole_prompt = run(ids, max_new_tokens=6, eos_token_id=7, attention_mask=torch.ones(1, 5))
    assert torch.equal(with_end, whole_prompt)


def test_hooks_see_each_committed_token():
    seen: list[list[int]] = []

    def hook(input_ids, scores):
        assert scores is None and input_ids.shape[0] == 1
        seen.append(input_ids[0].tolist())
        return torch.tensor([len(seen) == 4])

    result = run(IDS, max_new_tokens=9, eos_token_id=[], stopping_criteria=hook)
    assert result.shape == (1, 7)
    assert seen == [result[0, :n].tolist() for n in range(4, 8)]
    assert run(IDS, max_new_tokens=9, stopping_criteria=[lambda ids, scores: True]).shape == (1, 4)
