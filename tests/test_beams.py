"""Beam search: transformers' texts and scores, whatever caches hold of the texts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from every_recipe import CASES, program_of
from recurrent_archs import RECURRENT
from small_llama import small_llama
from source_models import model as source_model
from source_models import sources, written
from tiny import MASK, PROMPTS, cached_llama

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.ir import GraftworkWarning, InputError
from graftwork.ir.execution.executable import Planned
from graftwork.ir.plan import Contrastive
from graftwork.runtime import generate
from graftwork.runtime.asking.beams import check_beams
from graftwork.runtime.asking.options import read_options
from graftwork.runtime.cache.base import CachePolicy
from graftwork.runtime.scoring import score

VOCAB, END, PAD = 24, 16, 1
IDS = torch.tensor([[3, 4, 12, 5, 9, 2, 6, 5], [PAD, PAD, PAD, 2, 7, 8, 2, 8]])
RAGGED = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
KEPT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 4},
    "several": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": -1.0},
    "early": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    "never": {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0},
    "ends": {"num_beams": 3, "eos_token_id": [END, 3, 5]},
    "endless": {"num_beams": 3, "eos_token_id": None},
    "one token": {"num_beams": 5, "max_new_tokens": 1, "num_return_sequences": 5},
    "processors": {"num_beams": 4, "repetition_penalty": 1.5, "bad_words_ids": [[14], [20, 7]]},
    "lengths": {"num_beams": 3, "min_new_tokens": 9, "forced_eos_token_id": 5},
    "sampled": {"num_beams": 3, "do_sample": True, "top_k": 10, "temperature": 1.3},
    "filtered": {"num_beams": 4, "do_sample": True, "top_p": 0.3, "min_p": 0.3, "top_k": 2},
    "typical": {"num_beams": 2, "do_sample": True, "typical_p": 0.2, "epsilon_cutoff": 0.3},
}


@lru_cache(maxsize=1)
def llama() -> Any:
    return small_llama(VOCAB, END, pad_token_id=PAD)


@lru_cache(maxsize=8)
def fast(recipe: str = "baseline", target: str = "eager") -> Any:
    return gw.optimize(llama(), recipe, target=target)


def same(found: Any, wanted: Any, ids: Any, **asked: Any) -> None:
    """Texts, scores, and which beams they came from; sampled: from the same random numbers."""
    torch.manual_seed(7)
    theirs = wanted(ids, **asked)
    torch.manual_seed(7)
    ours = found(ids, **asked)
    assert torch.equal(ours.sequences, theirs.sequences), (ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.beam_indices, theirs.beam_indices)
    assert len(ours.scores) == len(theirs.scores) and len(ours.logits) == len(theirs.logits)
    for mine, other in zip(ours.scores, theirs.scores, strict=True):
        rows = mine.any(1)  # 0 where a prompt's search was over
        if "top_p" in asked:  # too few tokens are left: texts that are out are not processed
            continue
        torch.testing.assert_close(mine[rows], other[rows], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("search", SEARCHES)
def test_texts_and_scores_are_those_of_transformers(search: str) -> None:
    asked = {"do_sample": False, "max_new_tokens": 20, **KEPT, **SEARCHES[search]}
    same(fast().generate, llama().generate, IDS, attention_mask=RAGGED, **asked)


def test_guides_follow_their_texts() -> None:
    """transformers' do not: it feeds each the tokens of whatever text is in its place."""
    asked = {"num_beams": 3, "guidance_scale": 1.5, "max_new_tokens": 16, "do_sample": False}
    found = fast().generate(IDS, attention_mask=RAGGED, eos_token_id=None, **asked, **KEPT)
    for text, kept, given in zip(found.sequences, RAGGED, found.sequences_scores, strict=True):
        count = int(kept.sum())
        own, scores = text[8 - count :], []
        for place in range(count, len(own)):
            with torch.no_grad():
                pair = [llama()(own[None, first:place]).logits[0, -1] for first in (0, count - 1)]
            one, other = (logits.log_softmax(-1) for logits in pair)
            scores.append(float((other + 1.5 * (one - other))[own[place]]))
        assert float(given) == pytest.approx(sum(scores) / 16, rel=1e-4)


@pytest.mark.parametrize("target", ["onnxruntime", pytest.param("torch", marks=pytest.mark.long)])
def test_on_other_targets(target: str) -> None:
    """Alone and in a ragged batch, with a recipe that drafts: the target decodes alone."""
    for search in ("plain", "early", "processors", "sampled"):
        asked = {"do_sample": False, "max_new_tokens": 16, **KEPT, **SEARCHES[search]}
        found = fast("copyspec", target).generate
        with pytest.warns(GraftworkWarning, match="draft=suffix.* has no part in beams"):
            same(found, llama().generate, IDS, attention_mask=RAGGED, **asked)
            same(found, llama().generate, IDS[:1], **asked)


def tried() -> list[Any]:
    """Architectures: windows, latent attention, experts; recurrences and hybrids."""
    quick = {"llama", "gemma3_text", "mamba2"}
    names = ["llama", "gemma3_text", "mistral", "gpt2", "deepseek_v3", "mixtral", "bloom"]
    names += ["mamba", "mamba2", "qwen3_next", "falcon_h1", "lfm2", "jamba"]
    known = [name for name in names if name in ARCHS or name in RECURRENT]
    assert len(known) > 10
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.long) for n in known]


@pytest.mark.parametrize("name", tried())
def test_of_every_kind_of_cache(name: str) -> None:
    model = build(ARCHS.get(name) or RECURRENT[name])
    ids = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(3))
    asked = {"do_sample": False, "max_new_tokens": 14, **KEPT, "num_beams": 3, "pad_token_id": 1}
    for target in ("eager", "onnxruntime"):
        found = gw.optimize(model, "baseline", target=target).generate
        same(found, model.generate, ids, **asked, num_return_sequences=2)


@pytest.mark.parametrize("name", ["bart", pytest.param("t5", marks=pytest.mark.long)])
def test_of_models_that_write_from_a_source(name: str) -> None:
    """A checkpoint's own beams count, too, and what goes with them."""
    model = source_model(name)
    given = sources(name, 3)
    asked = {"max_new_tokens": 12, "num_beams": 4, "length_penalty": 2.0}
    plain = written(model, given, **{**asked, "num_beams": 1, "length_penalty": 1.0})
    want = written(model, given, **asked)
    assert not torch.equal(want, plain)
    assert torch.equal(
        gw.optimize(model, "baseline", target="eager").generate(**given, **asked), want
    )


def test_a_checkpoint_may_ask_for_beams() -> None:
    model = small_llama(VOCAB, END, pad_token_id=PAD)
    model.generation_config.update(num_beams=3, length_penalty=2.0, early_stopping=True)
    made = gw.optimize(model, "baseline", target="eager")
    for asked in ({}, {"num_beams": 1}, {"length_penalty": -2.0}):
        want = model.generate(IDS[:1], max_new_tokens=20, **asked)
        assert torch.equal(made.generate(IDS[:1], max_new_tokens=20, **asked), want), asked
    long = torch.randint(3, 16, (1, 40), generator=torch.Generator().manual_seed(3))
    want = model.generate(long, max_new_tokens=20)
    assert torch.equal(made.generate(long, max_new_tokens=20), want)  # whose beginning is shared


@pytest.mark.parametrize("name", CASES)
def test_scores_are_what_the_recipe_gives_such_texts(name: str, tmp_path: Any) -> None:
    """Whatever caches drop, round or hold together: a text's score is that of the text alone."""
    program = program_of(name, tmp_path)
    executable = compile(program, Target("eager", "cpu"))
    asked = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 90, **KEPT}
    asked |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    row = PROMPTS[2:3]
    if program.plan.depth.stops or not program.plan.verify.lone:
        with pytest.raises(InputError, match=r"num_beams=3: the recipe's (depth|verify)="):
            generate(executable, row, **asked)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftworkWarning)
        found = generate(executable, row, **asked)
    alone = Planned(executable, program.plan.undrafted())
    for text, given in zip(found.sequences, found.sequences_scores, strict=True):
        logits = score(alone, text[None], prompt=row.shape[1])[0, row.shape[1] - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, text[row.shape[1] :, None])
        torch.testing.assert_close(given, chosen.mean(), rtol=2e-4, atol=2e-4)


def test_what_texts_have_in_common_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows behind it move; all of them where rows may have been dropped."""
    executable = compile(cached_llama(), Target("eager", "cpu"))
    moved: list[int] = []
    take = type(executable).take_over

    def noted(self: Any, states: Any, source: Any, start: Any, stop: Any) -> None:
        moved.extend(b - a for a, b in zip(start, stop, strict=True))
        take(self, states, source, start, stop)

    monkeypatch.setattr(type(executable), "take_over", noted)
    asked = {"num_beams": 4, "max_new_tokens": 24, "attention_mask": MASK, "pad_token_id": 0}
    few = generate(executable, PROMPTS, **asked, do_sample=False)
    least, moved[:] = sum(moved), []
    monkeypatch.setattr(
        "graftwork.runtime.cache.keep_all.KeepAllPolicy.back_to", CachePolicy.back_to
    )
    assert torch.equal(generate(executable, PROMPTS, **asked, do_sample=False), few)
    assert 0 < least < sum(moved) / 2


def test_a_later_call_goes_on_from_the_best_text() -> None:
    made, asked = gw.optimize(llama(), "baseline", target="eager"), {"do_sample": False}
    ids = torch.randint(3, 16, (2, 20), generator=torch.Generator().manual_seed(5))
    text = made.generate(ids, num_beams=3, max_new_tokens=8, eos_token_id=None, **asked)
    again = made.generate(text, max_new_tokens=4, return_dict_in_generate=True, **asked)
    assert again.stats.reused_tokens >= 2 * 20
    assert torch.equal(again.sequences, llama().generate(text, max_new_tokens=4, **asked))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_beams": 0}, "num_beams: expected an integer in 1..1024, got 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3: expected at most"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping: expected True, False or"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty: expected a number"),
        ({"num_beams": 2, "num_beam_groups": 2}, "num_beam_groups=2; nearest: num_beams with"),
        ({"num_beams": 2, "streamer": "a streamer"}, "streamer: num_beams=2 decides on texts when"),
        ({"num_beams": 4, "eos_token_id": [*range(VOCAB)]}, "num_beams=4: 100 candidates"),
    ],
)
def test_what_beams_cannot_do_is_refused(asked: dict[str, Any], message: str) -> None:
    if "streamer" in asked:
        asked = {**asked, "streamer": type("S", (), {"put": print, "end": print})()}
    with pytest.raises(InputError, match=message):
        fast().generate(IDS, attention_mask=RAGGED, max_new_tokens=4, do_sample=False, **asked)


def test_verifiers_that_ask_drafts_are_refused() -> None:
    program = cached_llama()
    options = read_options({"num_beams": 2}, program.info)
    check_beams(options, program.plan)
    with pytest.raises(
        InputError, match=r"verify=contrastive.* decides by what another model says"
    ):
        check_beams(options, replace(program.plan, verify=Contrastive()))
