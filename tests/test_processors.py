"""Processors, grammars and stop strings: drafts of real recipes change no text under them."""

from __future__ import annotations

import json
import re
import warnings
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import mostly_long
from small_llama import small_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import graftwork as gw
from graftwork.ir import GraftworkWarning, InputError

LETTERS = '{}[]":,-.0123456789abcdefghijklmnopqrstuvwxyzĠ'
MERGES = [("{", '"'), ('"', ":"), ("a", "b"), ("t", "r"), ("tr", "u"), ("tru", "e")]
WORDS = [*LETTERS, *map("".join, MERGES), "<end>"]
END = len(WORDS) - 1
PROMPTS = [[20, 21, 22, 20, 21, 30, 20, 21], [25, 9, 25, 9, 40, 25, 9, 25]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-d]{1,5}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "good": {"type": "boolean"},
    },
    "required": ["name", "size", "good"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
ASKED: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.4},
    "bad words": {"bad_words_ids": [[21], [20, 22], [25, 9, 25]]},
    "n-grams": {"no_repeat_ngram_size": 2},
    "together": {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "min_new_tokens": 12},
    "stop strings": {"stop_strings": ["ab", "k", "9"]},
}
RECIPES = ("copyspec", "recycling", "medusa")


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(WORDS)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


@cache
def source() -> LlamaForCausalLM:
    sizes = {"intermediate_size": 48, "max_position_embeddings": 96}
    return small_llama(len(WORDS), END, pad_token_id=END, **sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    source().save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<end>").save_pretrained(path)
    return path


@cache
def optimized(folder: Path, recipe: str, target: str) -> gw.Model:
    return gw.optimize(folder, recipe, target=target)


def generated(model: gw.Model, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftworkWarning)  # of untrained heads
        return model.generate(torch.tensor(PROMPTS), return_dict_in_generate=True, **options)


CASES = [
    *[f"{recipe}-eager" for recipe in RECIPES],
    *[f"{recipe}-{target}" for recipe, target in product(RECIPES, ("onnxruntime", "torch"))],
]


@pytest.mark.parametrize(
    "case", mostly_long(CASES, [*(f"{r}-eager" for r in RECIPES), "copyspec-onnxruntime"])
)
def test_drafts_change_no_text(case: str, folder: Path) -> None:
    """That of transformers, of several processors and stop strings, on drafts that do come."""
    recipe, target = case.rsplit("-", 1)
    model = optimized(folder, recipe, f"{target}:cpu:float32" if target != "eager" else target)
    drafted = 0
    for options in ASKED.values():
        asked = {"max_new_tokens": 32, "do_sample": False, **options}
        theirs = dict(asked)
        if "stop_strings" in theirs:
            theirs["tokenizer"] = PreTrainedTokenizerFast(tokenizer_object=tokenizer())
        expected = source().generate(torch.tensor(PROMPTS), **theirs)
        found = generated(model, **asked)
        assert found.sequences.tolist() == expected.tolist(), options
        drafted += found.stats.draft_tokens
    assert drafted > 0


@pytest.mark.parametrize(
    "case", mostly_long(CASES, [*(f"{r}-eager" for r in RECIPES), "copyspec-onnxruntime"])
)
def test_drafts_change_no_text_of_a_grammar(case: str, folder: Path) -> None:
    """That of plain decoding, which is what the schema says; what it forces are drafts."""
    pytest.importorskip("llguidance")
    recipe, target = case.rsplit("-", 1)
    where = f"{target}:cpu:float32" if target != "eager" else target
    asked = {"json_schema": SCHEMA, "max_new_tokens": 60}
    plain = generated(optimized(folder, "baseline", where), **asked)
    found = generated(optimized(folder, recipe, where), **asked)
    assert found.sequences.tolist() == plain.sequences.tolist()
    for row in found.sequences[:, len(PROMPTS[0]) :].tolist():
        assert END in row
        said = json.loads(tokenizer().decode(row[: row.index(END)]))
        assert said.keys() == SCHEMA["properties"].keys()
        assert 0 <= said["size"] <= 99 and isinstance(said["good"], bool)
    # Plain decoding is given drafts, too: fewer steps than tokens.
    assert plain.stats.accepted_tokens > 0 and plain.stats.steps < plain.sequences.shape[1] - 9


def test_grammars_of_three_kinds(folder: Path) -> None:
    pytest.importorskip("llguidance")
    model = optimized(folder, "copyspec", "eager")
    for asked, text in (
        ({"regex": "(true|ab){3}"}, "(true|ab){3}"),
        ({"grammar": 'start: WORD "," WORD\nWORD: /[x-z]{2}/'}, "[x-z]{2},[x-z]{2}"),
        ({"json_schema": '{"enum": ["left", 7]}'}, '"left"|7'),
    ):
        for seed in range(3):
            found = generated(model, max_new_tokens=30, do_sample=True, seed=seed, **asked)
            for row in found.sequences[:, len(PROMPTS[0]) :].tolist():
                said = tokenizer().decode(row[: row.index(END)])
                assert re.fullmatch(text, said), said


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"regex": "a(b"}, "regex: no text can fit: "),
        ({"grammar": "start: nothing"}, "grammar: no text can fit: "),
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": {"type": "colour"}}, "json_schema: no text can fit: "),
        (
            {"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}},
            "json_schema: no text can fit: ",
        ),
        ({"regex": "a", "eos_token_id": []}, "regex: expected an end token"),
    ],
)
def test_what_no_text_fits_is_refused_before_anything_runs(
    asked: dict[str, Any], match: str, folder: Path
) -> None:
    pytest.importorskip("llguidance")
    model = gw.Model(optimized(folder, "baseline", "eager").program, gw.Target("eager"), {})
    with pytest.raises(InputError, match=match):
        model.generate(PROMPTS, **asked)
    assert model.compiled is None


def test_texts_and_lists_of_any_lengths(folder: Path) -> None:
    """Are padded on the left, and continued as each alone."""
    model = optimized(folder, "baseline", "eager")
    texts = ["abab", "true{", "x"]
    ids = [tokenizer().encode(text).ids for text in texts]
    width = max(map(len, ids))
    together = model.generate(texts, max_new_tokens=6, eos_token_id=[])
    assert together.shape == (3, width + 6)
    assert together.tolist() == model.generate(ids, max_new_tokens=6, eos_token_id=[]).tolist()
    for text, row, new in zip(texts, ids, together, strict=True):
        alone = model.generate(text, max_new_tokens=6, eos_token_id=[])
        assert alone.tolist() == [[*row, *new[width:].tolist()]]
    assert model.generate(inputs=texts[:1], max_new_tokens=2).shape == (1, len(ids[0]) + 2)
    begun = model.generate(bos_token_id=20, max_new_tokens=3, eos_token_id=[])
    assert (
        begun.tolist()
        == source().generate(bos_token_id=20, max_new_tokens=3, eos_token_id=None).tolist()
    )
    for wrong, match in (
        (["a", [1]], "expected token ids"),
        (["a", 1], "expected token ids"),
        ([[1], []], "sequence 1 is empty"),
        ([], "expected integers"),
    ):
        with pytest.raises(InputError, match=match):
            model.generate(wrong)
    with pytest.raises(InputError, match="attention_mask: expected none beside lists of unequal"):
        model.generate([[1], [1, 2]], attention_mask=torch.ones(2, 2))


def test_a_processor_sees_texts_that_may_come(folder: Path) -> None:
    """Whole texts, of one length a call, and nothing behind a token that it forbids."""
    seen: list[list[int]] = []

    def even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(ids) == len(scores) and scores.dtype == torch.float32
        seen.extend(ids.tolist())
        scores = scores.clone()
        scores[:, 1::2] = float("-inf")
        return scores

    found = generated(optimized(folder, "recycling", "eager"), logits_processor=[even])
    assert not (found.sequences[:, len(PROMPTS[0]) :] % 2).any()
    assert found.stats.draft_tokens
    for text in seen:
        assert text[:8] in PROMPTS and not any(token % 2 for token in text[8:])
    with pytest.raises(InputError, match=r"function returned \[2, 1\]; expected scores of shape"):
        generated(
            optimized(folder, "baseline", "eager"),
            logits_processor=lambda ids, scores: scores[:, :1],
        )
