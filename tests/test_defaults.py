"""How a checkpoint says it wants to be decoded: kept, obeyed, overruled and exported."""

from __future__ import annotations

import ast
import json
import string
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import TableExecutable, program, whole
from selection import one_in
from tiny import cached_llama, drafting_llama, named
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

import graftwork as gw
from graftwork.exporting.onnx_folder import export_genai, export_onnx
from graftwork.ir import Defaults, InputError, ParseError, UnsupportedError, parse_program
from graftwork.ir.plan.defaults import NEUTRAL, WITHOUT_EFFECT
from graftwork.runtime.asking.options import BEST, GenerationOptions, read_options

SAMPLES: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 7, "top_p": 0.9}
PROMPT = [[3, 1, 4, 1, 5]]


def llama(**generation: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(eos_token_id=[2, 3], pad_token_id=2, **generation)
    return model


def folder_of(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def asked(defaults: Defaults, **keywords: Any) -> GenerationOptions:
    info = program(11, context=16, eos=(4,)).info
    return read_options(keywords, type(info)(**{**vars(info), "defaults": defaults}))


@pytest.mark.parametrize(
    ("recipe", "saved"),
    one_in(4, [("copyspec", True), ("copyspec", False), ("baseline", False), ("baseline", True)]),
)
def test_a_checkpoint_that_samples_is_sampled_from(
    saved: bool, recipe: str, tmp_path: Path
) -> None:
    """In memory, from a folder, and after an artifact; a keyword of the call wins."""
    source = llama(**SAMPLES, repetition_penalty=1.2, max_new_tokens=9)
    model = gw.optimize(
        folder_of(source, tmp_path / "in") if saved else source, recipe, target="eager"
    )
    again = gw.load(model.save(tmp_path / "out"))
    explicit = {**SAMPLES, "repetition_penalty": 1.2, "max_new_tokens": 9}
    for made in (model, again):
        texts = [made.generate(PROMPT, seed=seed).tolist() for seed in range(4)]
        assert texts == [made.generate(PROMPT, seed=s, **explicit).tolist() for s in range(4)]
        assert len({str(text) for text in texts}) > 1
        greedy = made.generate(PROMPT, do_sample=False)
        wanted = source.generate(torch.tensor(PROMPT), do_sample=False)
        assert greedy.tolist() == wanted.tolist()
        best = made.generate(PROMPT, **BEST, max_new_tokens=6)
        wanted = source.generate(
            torch.tensor(PROMPT), do_sample=False, repetition_penalty=1.0, max_new_tokens=6
        )
        assert best.tolist() == wanted.tolist()
    assert "do_sample=True, temperature=0.7, top_k=7" in str(model.report)
    assert str(parse_program(str(model.program))) == str(model.program)


@pytest.mark.parametrize(
    "said",
    [
        {},
        SAMPLES,
        {"do_sample": True},
        {"temperature": 0.6, "top_p": 0.5},
        {"do_sample": True, "min_p": 0.1, "top_k": 0, "min_new_tokens": 2},
        {"max_new_tokens": 8, "repetition_penalty": 1.1},
        {"max_length": 12},
        {"max_length": 12, "max_new_tokens": 5},
    ],
)
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.3},
        {"max_new_tokens": 4},
        {"repetition_penalty": 1.0, "do_sample": True, "top_k": 3},
    ],
)
def test_the_merge_is_that_of_transformers(said: dict[str, Any], keywords: dict[str, Any]) -> None:
    """Every option that has an effect, as transformers' own generate works it out."""
    model = llama(**said)
    theirs, _ = model._prepare_generation_config(None, **keywords)
    ours = asked(Defaults(**said), **keywords)
    names = ["do_sample", "repetition_penalty"]
    names += ["temperature", "top_k", "top_p", "min_p"] if theirs.do_sample else []
    for name in names:
        said_there = getattr(theirs, name)
        unset = getattr(GenerationOptions, name)
        assert getattr(ours, name) == (unset if said_there is None else said_there), name
    assert ours.min_new_tokens == (theirs.min_new_tokens or 0)
    length = model.generate(torch.tensor(PROMPT), **keywords, eos_token_id=None).shape[1]
    assert ours.new_tokens(5, 5, program(11, context=64).info) == length - 5


def test_defaults_of_lengths_give_way() -> None:
    """To the call's keywords, and to what the context leaves."""
    long = Defaults(max_new_tokens=500, min_new_tokens=9)
    options = asked(long)
    assert options.new_tokens(3, 3, program(11, context=16).info) == 13
    assert asked(long, max_length=8).new_tokens(3, 3, program(11, context=16).info) == 5
    assert asked(long, max_new_tokens=4).new_tokens(3, 3, program(11, context=16).info) == 4
    with pytest.raises(InputError, match=r"max_length=3 \(the checkpoint's default\) leaves no"):
        asked(Defaults(max_length=3)).new_tokens(5, 5, program(11, context=16).info)


def test_what_is_not_supported_is_refused_by_name_until_it_is_waived(tmp_path: Path) -> None:
    source = llama(num_beams=4, num_beam_groups=2, no_repeat_ngram_size=2)
    model = gw.optimize(source, target="eager")
    assert "num_beams=4" in str(model.report)
    with pytest.raises(InputError, match=r"asks for num_beam_groups=2.*give num_beam_groups=1"):
        model.generate(PROMPT)
    # What is no field of its own is obeyed all the same.
    asked = {"num_beam_groups": 1, "max_new_tokens": 30}
    wanted = source.generate(torch.tensor(PROMPT), **asked)
    assert torch.equal(model.generate(PROMPT, **asked), wanted)
    assert not torch.equal(model.generate(PROMPT, **asked, num_beams=1), wanted)
    free = {"num_beam_groups": 1, "num_beams": 1, "no_repeat_ngram_size": 0, "max_new_tokens": 30}
    assert not torch.equal(model.generate(PROMPT, **free), wanted)
    with pytest.raises(UnsupportedError, match=r"num_beams=4, num_beam_groups=2, no_rep.*lacks"):
        model.export_genai(tmp_path / "genai")
    assert not (tmp_path / "genai").exists()


def test_every_setting_of_transformers_is_known() -> None:
    """A field that a new transformers brings is obeyed, refused, or known to change no text."""
    ours = {f.name for f in fields(Defaults)} - {"unsupported"}
    kinds = (ours, set(NEUTRAL), set(WITHOUT_EFFECT))
    theirs = vars(GenerationConfig()).keys()
    assert set().union(*kinds) - {"num_return_sequences"} == theirs - {"num_return_sequences"}
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    neutral = GenerationConfig._get_default_generation_params()
    assert all(neutral[n] in NEUTRAL[n] for n in NEUTRAL.keys() & neutral if neutral[n] is not None)
    lossless = {*ALL_CACHE_IMPLEMENTATIONS, "paged"} - {"quantized"}
    assert set(NEUTRAL["cache_implementation"]) == lossless


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("cache_implementation", "quantized"),
        ("force_words_ids", [[5]]),
    ],
)
def test_settings_that_change_the_text_are_refused_by_name(name: str, value: object) -> None:
    model = gw.optimize(llama(**{name: value}), target="eager")
    with pytest.raises(InputError, match=rf"asks for {name}=.* not supported; give {name}=") as got:
        model.generate(PROMPT)
    advice = str(got.value).split("; give ")[1].split(" to generate")[0].partition("=")
    keywords = {advice[0]: ast.literal_eval(advice[2])}
    assert model.generate(PROMPT, **keywords, max_new_tokens=3).shape[1] <= 8


def test_the_values_of_a_generation_config_are_keywords() -> None:
    """As the object itself, with all that transformers writes beside them."""
    source = llama(**SAMPLES, repetition_penalty=1.2)
    model = gw.optimize(llama(), target="eager")
    config = source.generation_config
    config.bos_token_id, config.cache_implementation = 1, "dynamic"
    said = config.to_diff_dict()
    assert "transformers_version" in said
    text = model.generate(PROMPT, **said, seed=1, max_new_tokens=9)
    wanted = gw.optimize(source, target="eager").generate(PROMPT, seed=1, max_new_tokens=9)
    assert torch.equal(text, wanted)
    for given in (config, said):
        found = model.generate(PROMPT, generation_config=given, seed=1, max_new_tokens=9)
        assert torch.equal(found, wanted)
    with pytest.raises(InputError, match="does not support cache_implementation='quantized'"):
        model.generate(PROMPT, cache_implementation="quantized")


def test_texts_stop_a_generation() -> None:
    """Of a call and of a checkpoint, as transformers' criterion does."""
    letters = string.ascii_letters[:40]
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    source = llama(stop_strings=["x"])
    model = gw.optimize(source, target="eager")
    with pytest.raises(InputError, match=r"came without a tokenizer.json; give tokenizer="):
        model.generate(PROMPT)
    free = {"stop_strings": None, "eos_token_id": [], "max_new_tokens": 8}
    whole = model.generate(PROMPT, **free)[0].tolist()
    new = whole[len(PROMPT[0]) :]
    until = next(i for i in range(1, 8) if new[i] not in new[:i])
    criteria = [StopStringCriteria(tokenizer, letters[new[until]])]
    cut = model.generate(PROMPT, stopping_criteria=criteria, **free)[0].tolist()
    assert cut == whole[: len(PROMPT[0]) + until + 1]
    for reads in (tokenizer, backend):
        given = {**free, "stop_strings": letters[new[until]], "tokenizer": reads}
        assert model.generate(PROMPT, **given)[0].tolist() == cut


@pytest.mark.parametrize(
    ("said", "match"),
    one_in(
        3,
        [
            ({"do_sample": True, "temperature": -1.0}, "config, temperature: expected a number"),
            ({"do_sample": True, "top_p": 2.0}, "generation config, top_p: expected a number from"),
            ({"repetition_penalty": 0.0}, "config, repetition_penalty: expected a number"),
        ],
    ),
)
def test_defaults_that_are_no_options_are_refused_when_a_model_is_made(
    said: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=match):
        gw.optimize(folder_with(said, tmp_path / "in"), target="eager")


def folder_with(said: dict[str, Any], folder: Path) -> Path:
    """A checkpoint whose generation_config.json somebody wrote by hand."""
    folder_of(llama(), folder)
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


def test_a_config_json_of_old_says_it_too(tmp_path: Path) -> None:
    """Without a generation_config.json, as transformers reads it."""
    folder = folder_of(llama(), tmp_path / "in")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "do_sample": True, "top_k": 4}))
    found = gw.optimize(folder, target="eager").program.info.defaults
    assert found == Defaults(do_sample=True, top_k=4)


def test_the_text_of_a_program_has_them_checked() -> None:
    plain = cached_llama()
    text = str(plain).replace("pad=None)", "pad=None, do_sample=True, temperature=0.5)")
    assert text != str(plain)
    found = parse_program(text)
    assert found.info.defaults == Defaults(do_sample=True, temperature=0.5) and str(found) == text
    assert parse_program(str(plain)).info.defaults == Defaults()
    for wrong in ("temperature='hot'", "do_sample=1", "unsupported=('rm=1',)", "defaults=3"):
        with pytest.raises(ParseError):
            parse_program(str(plain).replace("pad=None)", f"pad=None, {wrong})"))


def test_an_artifact_with_a_bad_default_is_not_loaded(tmp_path: Path) -> None:
    info = cached_llama().info
    bad = type(info)(**{**vars(info), "defaults": Defaults(do_sample=True, top_p=7.0)})
    made = gw.Model(cached_llama().replace(info=bad), gw.Target("eager"), {"name": "test"})
    with pytest.raises(InputError, match="top_p: expected a number from 0 to 1, got 7"):
        gw.load(made.save(tmp_path / "out"))


def test_exports_say_it(tmp_path: Path) -> None:
    info = cached_llama().info
    said = Defaults(**SAMPLES, repetition_penalty=1.3, max_length=50, max_new_tokens=9)
    sampling = cached_llama().replace(info=type(info)(**{**vars(info), "defaults": said}))
    genai = export_genai(sampling, tmp_path / "genai")
    search = json.loads((genai / "genai_config.json").read_text())["search"]
    assert {name: search[name] for name in SAMPLES} == SAMPLES
    assert search["repetition_penalty"] == 1.3 and search["max_length"] == 50
    plain = json.loads(
        (export_genai(cached_llama(), tmp_path / "p") / "genai_config.json").read_text()
    )
    assert plain["search"]["do_sample"] is False and "temperature" not in plain["search"]
    for folder in (genai, export_onnx(sampling, tmp_path / "onnx")):
        wrote = GenerationConfig.from_pretrained(folder)
        assert (wrote.do_sample, wrote.top_p, wrote.max_new_tokens) == (True, 0.9, 9)
        assert wrote.eos_token_id == 0


def test_speculation_samples_by_default_too() -> None:
    """What a drafter and a verifier are told is what plain decoding is told."""
    drafting = drafting_llama(named("draft_suffix"))
    said = Defaults(do_sample=True, temperature=1.5)
    made = drafting.replace(info=type(drafting.info)(**{**vars(drafting.info), "defaults": said}))
    model = gw.Model(made, gw.Target("eager"), {"name": "test"})
    texts = {str(model.generate(PROMPT, seed=seed, max_new_tokens=8).tolist()) for seed in range(5)}
    assert len(texts) > 1


def test_without_defaults_nothing_changes() -> None:
    table = TableExecutable(whole(11), program(11, context=16, eos=(4,)))
    from graftwork.runtime import generate

    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(generate(table, ids), generate(table, ids, do_sample=False))
