"""Models that write from a source: t5, bart and whisper, as transformers write with them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from archs import build
from shrunk import shrunk
from source_models import EDITED, TOKENS, TYPES, copying, made, model, sources, written

import graftwork as gw
from graftwork.ir import GraftworkError

QUANTIZED = torch.ops.graftwork.quantized_linear.default


@lru_cache(maxsize=32)
def fast(name: str, recipe: str, target: str) -> Any:
    return gw.optimize(model(name), recipe, target=target)


def combinations() -> Iterator[Any]:
    """Types on targets; the first that show it, and the rest."""
    for name in TYPES:
        for target in ("eager", "onnxruntime", "torch"):
            quick = (name, target) in {("t5", "onnxruntime"), ("bart", "eager")}
            seldom = target == "torch" and name != "t5"
            mark = pytest.mark.sweep if seldom else pytest.mark.long
            yield pytest.param(name, target, marks=[] if quick else [mark])


@pytest.mark.parametrize(("name", "target"), combinations())
def test_the_same_tokens(name: str, target: str) -> None:
    """Alone, and in a batch of sources of several lengths, whose padding changes nothing."""
    for count in (1, 3):
        given = sources(name, count)
        want = written(model(name), given, max_new_tokens=24)
        # Texts vary, so that equal means something.
        assert min(len(set(row)) for row in want.tolist()) > 4
        got = fast(name, "baseline", target).generate(**given, max_new_tokens=24)
        assert torch.equal(got, want)


@pytest.mark.long
def test_from_a_folder_validated_and_saved(tmp_path) -> None:
    """A checkpoint's folder is as good as the model, every pass keeps its contract on random
    sources, and what was saved runs elsewhere."""
    given = sources("bart", 3)
    want = written(model("bart"), given, max_new_tokens=16)
    model("bart").save_pretrained(tmp_path / "bart")
    made_of_it = gw.optimize(tmp_path / "bart", "copyspec", target="eager", validate=True)
    assert torch.equal(made_of_it.generate(**given, max_new_tokens=16), want)
    made_of_it.save(tmp_path / "saved")
    loaded = gw.load(tmp_path / "saved", target="onnxruntime")
    assert torch.equal(loaded.generate(**given, max_new_tokens=16), want)


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_drafts_of_all_shapes(name: str) -> None:
    """Chains and trees are verified by the same cross-attention and biases, and fed together."""
    given = sources(name, 3)
    want = written(model(name), given, max_new_tokens=24)
    passes = ["draft_jacobi"]  # without the recipe's lengths, which may give up so short a text
    blocks = {"title": "t", "contract": "lossless", "extends": "baseline", "passes": passes}
    for chosen in ("recycling", blocks):
        fast = gw.optimize(model(name), chosen, target="onnxruntime")
        out = fast.generate(**given, max_new_tokens=24, return_dict_in_generate=True)
        assert torch.equal(out.sequences, want)
        assert out.stats.accepted_tokens > 3


@pytest.mark.parametrize("target", ["eager", pytest.param("onnxruntime", marks=pytest.mark.long)])
def test_drafts_are_copied_from_the_source(target: str) -> None:
    """Aggressive decoding: a text that follows its source costs few steps, edits included."""
    copier = copying()
    ids = torch.randint(3, TOKENS, (3, 20), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = ids[1, 12] = 2
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    given = {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}
    want = written(copier, given, max_new_tokens=22)
    assert want[0, 1:].tolist() == [EDITED.get(token, token) for token in ids[0].tolist()]
    assert want[0, 1:].tolist() != ids[0].tolist()
    steps = {}
    for recipe in ("baseline", "aggressive", "copyspec"):
        out = gw.optimize(copier, recipe, target=target).generate(
            **given, max_new_tokens=22, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, want)
        steps[recipe] = out.stats.steps
    assert max(steps["aggressive"], steps["copyspec"]) * 3 <= 2 * steps["baseline"], steps


@pytest.mark.long
def test_int8_drafts_and_batches_change_nothing() -> None:
    """Encoder and decoder have weights of few bits, and a text is the same however it is made."""
    copier, recipe = model("t5"), gw.Recipe.load("int8")
    plain = gw.optimize(copier, recipe, target="onnxruntime")
    quantized = [fn.calls(QUANTIZED) for fn in plain.program.functions.values()]
    assert all(quantized) and len(quantized) == 2
    given = sources("t5", 3)
    want = plain.generate(**given, max_new_tokens=16)
    both = {**recipe.as_dict(), "passes": [*recipe.as_dict()["passes"], {"pass": "draft_suffix"}]}
    drafting = gw.optimize(copier, {**both, "name": "both"}, target="onnxruntime")
    assert torch.equal(drafting.generate(**given, max_new_tokens=16), want)


@pytest.mark.long
def test_what_generation_configs_force(tmp_path) -> None:
    """First and last tokens that are forced, and tokens that never come, or not at first."""
    bart, speech = made("bart"), made("whisper")
    bart.generation_config.forced_bos_token_id = 5
    bart.generation_config.forced_eos_token_id = 2
    bart.generation_config.bad_words_ids = [[9], [11]]
    given = sources("bart", 3)
    usual = written(model("bart"), given, max_new_tokens=12)
    forced = gw.optimize(bart, "copyspec", target="eager")
    for count in (1, 2, 12):
        want = written(bart, given, max_new_tokens=count)
        assert torch.equal(forced.generate(**given, max_new_tokens=count), want)
    assert want[0, 1] == 5 and want[0, -1] == 2 and not torch.equal(want, usual)
    given = sources("whisper", 2)
    first, later = written(model("whisper"), given, max_new_tokens=12)[0, 1:3].tolist()
    options = {"suppress_tokens": [later], "begin_suppress_tokens": [first], "max_new_tokens": 12}
    want = written(speech, given, **options)
    assert later not in want[0].tolist() and first != want[0, 1]
    assert torch.equal(fast("whisper", "baseline", "eager").generate(**given, **options), want)


def test_beginnings_and_samples() -> None:
    """Texts may begin with more than one token, go on several times, and repeat by their seed."""
    given, begun = sources("bart", 3), torch.tensor([[2, 5, 6], [2, 7, 8], [2, 9, 5]])
    plain = fast("bart", "baseline", "eager")
    for start in (begun, begun[:, 1:]):  # transformers puts the token that starts texts before it
        want = written(model("bart"), given, decoder_input_ids=start, max_new_tokens=10)
        assert torch.equal(
            plain.generate(**given, decoder_input_ids=start, max_new_tokens=10), want
        )
    for options in (
        {"decoder_start_token_id": 7},
        {"decoder_input_ids": begun, "decoder_attention_mask": torch.ones_like(begun)},
    ):
        want = written(model("bart"), given, max_new_tokens=10, **options)
        assert torch.equal(plain.generate(**given, max_new_tokens=10, **options), want)
    drawn = {"do_sample": True, "seed": 3, "num_return_sequences": 2, "max_new_tokens": 10}
    ours = plain.generate(**given, **drawn)
    assert ours.shape == (6, 11) and not torch.equal(ours[0], ours[1])
    assert torch.equal(fast("bart", "baseline", "onnxruntime").generate(**given, **drawn), ours)
    best = written(model("bart"), given, max_new_tokens=10).repeat_interleave(2, 0)
    assert torch.equal(plain.generate(**given, **{**drawn, "top_k": 1}), best)


BAD_INPUT = {
    "features of another size": ("whisper", {"input_features": torch.randn(1, 8, 59)}, "8,60"),
    "features that are ids": ("whisper", {"input_features": torch.ones(1, 9).long()}, "a sound"),
    "ids where features go": ("whisper", {"input_ids": torch.ones(1, 9).long()}, "input_features="),
    "features that are no numbers": (
        "whisper",
        {"input_features": torch.full((1, 8, 60), torch.nan)},
        "finite",
    ),
    "features for a text": ("bart", {"input_features": torch.randn(1, 8, 60)}, "input_ids="),
    "both": ("bart", {"input_ids": torch.ones(1, 9).long(), "input_features": 1}, "a text"),
    "an id too large": ("bart", {"input_ids": torch.full((1, 4), 97)}, "token id 97"),
    "a source too long": ("bart", {"input_ids": torch.ones(1, 129).long()}, "129 tokens"),
    "padding within": (
        "bart",
        {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[1, 0, 1]])},
        "inside its text",
    ),
    "nothing but padding": (
        "bart",
        {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.zeros(1, 3)},
        "source 0 is empty",
    ),
    "a mask of another shape": (
        "bart",
        {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 4)},
        "shape",
    ),
    "too few beginnings": (
        "bart",
        {"input_ids": torch.ones(2, 3).long(), "decoder_input_ids": torch.ones(1, 1).long()},
        "one row a source",
    ),
    "a beginning with padding": (
        "bart",
        {
            "input_ids": torch.ones(1, 3).long(),
            "decoder_input_ids": torch.ones(1, 2).long(),
            "decoder_attention_mask": torch.tensor([[0, 1]]),
        },
        "decoder_attention_mask: expected ones",
    ),
    "groups of beams": (
        "bart",
        {"input_ids": torch.ones(1, 3).long(), "num_beams": 4, "num_beam_groups": 2},
        "num_beam_groups=2; nearest: num_beams",
    ),
    "a language": (
        "whisper",
        {"input_features": torch.randn(1, 8, 60), "language": "en"},
        "the model knows none by name: give the tokens as decoder_input_ids",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case: str) -> None:
    """Said by name, before anything is compiled."""
    name, given, reason = BAD_INPUT[case]
    with pytest.raises(GraftworkError, match=reason):
        fast(name, "baseline", "eager").generate(**given)


@pytest.mark.long
def test_what_serves_texts_alone_is_refused(tmp_path) -> None:
    """Prefixes, scores, and text to calibrate on: with the reason."""
    plain, ids = fast("bart", "baseline", "eager"), torch.randint(3, 90, (1, 20))
    with pytest.raises(GraftworkError, match="prefix would serve no other"):
        plain.save_prefix(ids, tmp_path / "prefix")
    with pytest.raises(GraftworkError, match="writes from a source"):
        plain(ids)
    with pytest.raises(GraftworkError, match="is an encoder-decoder"):
        gw.optimize(model("bart"), "gptq", target="eager", data=[list(range(3, 60))])
    alone = gw.optimize(build(shrunk("bart")), "baseline", target="eager")
    with pytest.raises(GraftworkError, match="reads no source"):
        alone.generate(ids, decoder_input_ids=ids)


def test_nothing_is_held_of_other_sources() -> None:
    """A text that begins as the last call's does not go on from it: its source is another."""
    plain = fast("bart", "baseline", "eager")
    begun = torch.tensor([[2, *range(5, 40)]])
    for seed in (1, 2, 1):
        given = sources("bart", 1, seed)
        options = {"decoder_input_ids": begun, "max_new_tokens": 6}
        out = plain.generate(**given, **options, return_dict_in_generate=True)
        assert out.stats.reused_tokens == 0
        assert torch.equal(out.sequences, written(model("bart"), given, **options))


@pytest.mark.long
def test_caches_of_few_bits_and_of_fewer_rows() -> None:
    """What is made of a source is stored in few bits like any cache; rules that drop a text's rows
    leave it alone, and are refused where a bias counts them."""
    given, recipe = sources("bart", 3), gw.Recipe.load("kv_int8")
    stored = gw.optimize(model("bart"), recipe, target="eager")
    assert str(stored.program.states["cross.0.key.codes"].type) == "u8[B,4,E,8]"
    ours = stored.generate(**given, max_new_tokens=12)
    assert (ours == written(model("bart"), given, max_new_tokens=12)).float().mean() > 0.5
    options = ["evict_cache.budget=32", "evict_cache.block=16", "evict_cache.positions=absolute"]
    dropping = gw.Recipe.load("streaming_llm").with_options(options)
    kept = gw.optimize(model("bart"), dropping, target="eager")
    few = kept.generate(**given, max_new_tokens=40)
    assert torch.equal(few[:, :40], written(model("bart"), given, max_new_tokens=39))
    assert kept.generate(**given, max_new_tokens=60).shape == (3, 61)
    with pytest.raises(GraftworkError, match="weighs rows by their distance"):
        gw.optimize(model("t5"), dropping, target="eager")
