"""Every keyword of transformers' `generate`: equal, without effect, or refused; none is ignored."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from keyword_cases import (
    BOTH,
    CASES,
    DRAWN,
    END,
    EQUAL,
    PROMPTS,
    REFUSED,
    SAME,
    VOCAB,
    Case,
    Favour,
    all_keywords,
    table,
)
from noisy import Multinomial
from runtime_models import Recorder, TableExecutable, program
from small_llama import small_llama
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    WatermarkingConfig,
)

import graftwork as gw
from graftwork.ir import GraftworkWarning, InputError
from graftwork.ir.execution.executable import Planned
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import Generated, generate
from graftwork.runtime.asking.keywords import GenerateOptions
from graftwork.runtime.asking.options import SUPPORTED
from graftwork.runtime.asking.other_keywords import INSTEAD

DRAFT = SuffixDraft(tokens=4, shortest=1)
ELSEWHERE = {"decoder_input_ids", "decoder_start_token_id", "decoder_attention_mask"}
ELSEWHERE |= {"input_features", "inputs_embeds", "streamer", "inputs", "input_ids"}
"""Keywords that other tests try: of sources, of speech, of rows, and what these tests themselves
pass."""

BEAMS = {"num_beams", "length_penalty", "early_stopping"}
"""Keywords under which texts go on from each other."""

DEAR = {"cache_implementation", "compile_config", "continuous_batching_config", "synced_gpus"}
DEAR |= {"assistant_early_exit", "use_mtp", "speculation_type", "is_assistant"}
"""Keywords that transformers is not given here: it compiles for them, or wants several processes,
or a model that drafts for itself."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_llama(VOCAB, END, pad_token_id=0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({chr(97 + n): n for n in range(VOCAB)}, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


MEMO: dict[tuple[int, ...], torch.Tensor] = {}
"""Logits behind texts: every test asks the same model."""


def executable(model: LlamaForCausalLM, draft: Any) -> TableExecutable:
    """The model, recomputed from the cached tokens."""

    @torch.no_grad()
    def rule(seen: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([seen])).logits[0, -1]

    made = TableExecutable(rule, program(VOCAB, draft=draft, eos=(END,), pad=0), (1, 5, 16))
    made.memo = MEMO
    return made


def cached(model: LlamaForCausalLM, draft: Any) -> Planned:
    """The model with states, which beams exchange."""
    made = gw.optimize(model, "baseline", target="eager").executable
    plan = made.program.plan
    return Planned(made, plan if draft is None else replace(plan, draft=draft))


@cache
def plain_text(model: LlamaForCausalLM, seed: int | None = None) -> list[list[int]]:
    """What transformers writes without any keyword; seed: sampled, without an end."""
    given = {"do_sample": seed is not None, "eos_token_id": END if seed is None else None}
    return model.generate(torch.tensor(PROMPTS), max_new_tokens=24, **given).tolist()


def keywords_of(case: Case, tokenizer: Any) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    """The prompts, and what transformers and graftwork are given."""
    given = {"max_new_tokens": 24, "do_sample": False, **case.keywords}
    if case.name in ("max_length", "generation_config"):
        del given["max_new_tokens"]
    ids = given.pop("inputs", torch.tensor(PROMPTS))
    ids = torch.tensor([[given["bos_token_id"]]]) if ids is None else ids
    if case.name == "prompt_lookup_num_tokens":
        ids = ids[:1]  # transformers drafts for one text
    if case.name != "bos_token_id":
        given.setdefault("eos_token_id", END)
    if "stop_strings" in given:
        given["tokenizer"] = tokenizer
    theirs = dict(given)
    if case.name == "generation_config":
        theirs["generation_config"] = GenerationConfig(**theirs["generation_config"])
    if case.name == "watermarking_config":
        theirs["watermarking_config"] = WatermarkingConfig(**theirs["watermarking_config"])
    return ids, theirs, given


def texts_of(found: Any) -> list[list[int]]:
    return (found if isinstance(found, torch.Tensor) else found.sequences).tolist()


def tried(*verdicts: str) -> list[Any]:
    return [
        pytest.param(c, id=c.name)
        for c in CASES
        if c.verdict in verdicts and c.name not in ELSEWHERE
    ]


@pytest.mark.parametrize("case", tried(EQUAL, SAME))
def test_the_text_is_that_of_transformers(model: Any, tokenizer: Any, case: Case) -> None:
    """Greedily, alone and under drafts; of keywords with an effect, another one than without."""
    ids, theirs, ours = keywords_of(case, tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.name in DEAR:
            del theirs[case.name]
        expected = model.generate(ids, **theirs)
        for draft in (None, DRAFT):
            runs = cached(model, draft) if case.name in BEAMS else executable(model, draft)
            found = generate(runs, ids, **ours)
            assert texts_of(found) == texts_of(expected), draft
            _equal_steps(found, expected)
    silent = {"return_dict_in_generate", "output_scores", "output_logits", "remove_invalid_values"}
    silent |= {"renormalize_logits", "max_time", "bos_token_id", "position_ids"}
    if case.verdict == EQUAL and case.name not in silent:
        assert texts_of(expected) != plain_text(model), "the case shows nothing"


def _equal_steps(found: Any, expected: Any) -> None:
    """Scores and logits of sequences that are not finished."""
    for name in ("scores", "logits"):
        theirs = None if isinstance(expected, torch.Tensor) else getattr(expected, name)
        if theirs is None:
            continue
        ours, prompt = getattr(found, name), len(PROMPTS[0])
        assert len(ours) == len(theirs) == found.sequences.shape[1] - prompt
        for step, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
            open_rows = (found.sequences[:, prompt : prompt + step] != END).all(1)
            torch.testing.assert_close(mine[open_rows], wanted[open_rows], rtol=1e-4, atol=1e-4)
            assert not mine[~open_rows].any()


@pytest.mark.parametrize("case", tried(DRAWN))
def test_samples_are_those_of_transformers(
    model: Any, tokenizer: Any, case: Case, monkeypatch: Any
) -> None:
    """With one way of drawing a token in both."""
    drawing = Multinomial()
    monkeypatch.setattr(torch, "multinomial", drawing)
    ids, theirs, ours = keywords_of(case, tokenizer)
    theirs["eos_token_id"] = ours["eos_token_id"] = (
        None  # transformers draws for finished ones, too
    )
    differs = False
    for seed in range(2):
        drawing.manual_seed(seed)
        expected = model.generate(ids, **theirs).tolist()
        assert generate(executable(model, None), ids, **ours, seed=seed).tolist() == expected
        drawing.manual_seed(seed)
        free = plain_text(model, None if case.name == "do_sample" else seed)
        differs = differs or free != expected
    assert differs, "the case shows nothing"


@pytest.mark.parametrize("case", tried(DRAWN)[1:])
def test_what_sampling_looks_at_warns_without_it(model: Any, tokenizer: Any, case: Case) -> None:
    """As in transformers, whose text it leaves as it is."""
    ids, theirs, ours = keywords_of(case, tokenizer)
    theirs["do_sample"] = ours["do_sample"] = False
    if case.name == "num_return_sequences":
        with pytest.raises(ValueError, match="num_return_sequences"):
            model.generate(ids, **theirs)
        with pytest.raises(InputError, match="num_return_sequences=3 has no effect on greedy"):
            generate(executable(model, None), ids, **ours)
        return
    with pytest.warns(GraftworkWarning, match=f"{case.name}=.* has no effect on greedy"):
        found = generate(executable(model, None), ids, **ours)
    assert found.tolist() == model.generate(ids, **theirs).tolist()


@pytest.mark.parametrize("case", tried(SAME))
def test_what_changes_no_text_warns(model: Any, case: Case) -> None:
    ids = torch.tensor(PROMPTS)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        generate(executable(model, None), ids, max_new_tokens=2, **case.keywords)
    said = [str(each.message) for each in seen if issubclass(each.category, GraftworkWarning)]
    quiet = {"transformers_version", "_from_model_config", "trust_remote_code", "logits_to_keep"}
    quiet |= {"cache_implementation"}  # of a kind that changes no text
    assert len(said) == (case.name not in quiet), said


@pytest.mark.parametrize("case", tried(BOTH))
def test_transformers_refuses_it_too(model: Any, case: Case) -> None:
    with pytest.raises(ValueError, match=r"trust_remote_code|custom_generate|Hub"):
        model.generate(torch.tensor(PROMPTS), max_new_tokens=3, do_sample=False, **case.keywords)


@pytest.mark.parametrize("case", tried(BOTH, REFUSED))
def test_refusals_name_what_works(model: Any, case: Case) -> None:
    instead = re.escape(INSTEAD[case.name])
    with pytest.raises(InputError, match=rf"does not support {case.name}=.*; nearest: {instead}"):
        generate(executable(model, None), torch.tensor(PROMPTS), **case.keywords)


def test_no_keyword_is_left_out() -> None:
    assert {case.name for case in CASES} >= all_keywords()
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(case.verdict != REFUSED for case in CASES) >= 85


def test_the_table_of_the_docs_is_this_one() -> None:
    page = (Path(__file__).parent.parent / "docs" / "generate.md").read_text()
    assert table() in page, "run python tests/keyword_cases.py, and put its table into the page"


def test_editors_complete_what_is_supported() -> None:
    beside = {"input_ids", "inputs", "input_features", "generation_config", "bos_token_id"}
    assert GenerateOptions.__annotations__.keys() == {*SUPPORTED, *beside}


def test_a_streamer_gets_what_transformers_hands_on(model: Any) -> None:
    ids, seen = torch.tensor(PROMPTS[:1]), []
    for run in (model.generate, lambda *a, **k: generate(executable(model, None), *a, **k)):
        recorder = Recorder()
        run(ids, max_new_tokens=6, do_sample=False, streamer=recorder, repetition_penalty=1.2)
        seen.append(recorder.streamed())
    assert seen[0] == seen[1]


def test_scores_are_those_of_plain_decoding_under_drafts(model: Any) -> None:
    """Processed and sampled; the rows of finished sequences are 0."""
    given = {"do_sample": True, "top_k": 7, "temperature": 0.8, "max_new_tokens": 12}
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for draft in (None, DRAFT):
        found = generate(executable(model, draft), torch.tensor(PROMPTS), **given, **kept, seed=1)
        assert isinstance(found, Generated) and found.scores and found.logits
        for step, (scores, logits) in enumerate(zip(found.scores, found.logits, strict=True)):
            for row, text in enumerate(found.sequences[:, : 8 + step]):
                if END in text[8:]:
                    continue
                wanted = model(text[None]).logits[0, -1]
                torch.testing.assert_close(logits[row], wanted, rtol=1e-4, atol=1e-4)
                assert int((scores[row] > float("-inf")).sum()) == 7
                assert scores[row, found.sequences[row, 8 + step]] > float("-inf")


def test_without_transformers_the_extra_is_named(model: Any, monkeypatch: Any) -> None:
    """What graftwork has itself, and functions of the call, work all the same."""
    plain, ids = executable(model, None), torch.tensor(PROMPTS)
    own = {"repetition_penalty": 1.3, "min_new_tokens": 4, "suppress_tokens": [3]}
    own |= {"logits_processor": [Favour()], "output_scores": True, "return_dict_in_generate": True}
    expected = texts_of(generate(plain, ids, **own))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert texts_of(generate(plain, ids, **own)) == expected
    for asked in ({"no_repeat_ngram_size": 2}, {"typical_p": 0.5, "do_sample": True}):
        with pytest.raises(InputError, match=f"{next(iter(asked))} needs the package transformers"):
            generate(plain, ids, **asked)
