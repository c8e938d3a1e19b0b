"""An amateur model that a step's logits are contrasted with: the papers' words as loops."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import mostly_long
from small_llama import small_llama
from test_front_door import ROOT
from tiny import tiny_llama
from transformers import LlamaForCausalLM

import graftwork as gw
from graftwork.ir import InputError, PassError, Program
from graftwork.passes.depth.skip_layers import SkipLayers
from graftwork.passes.engine.base import Pass
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.contrast_model import ContrastModel

PROMPTS = [[5, 6, 7, 5, 6, 9, 5, 6], [11, 3, 11, 3, 12, 11, 3, 11]]
NEW = 20
DRAFTS: dict[str, list[Any]] = {
    "chains": [{"draft_suffix": {"tokens": 3}}],
    "trees": ["accept_trees", "add_top_tokens", "draft_recycling"],
    "int4": [{"quantize_weights": {"group": 16}}, {"draft_suffix": {"tokens": 3}}],
    "cache": [{"quantize_cache": {}}, {"draft_suffix": {"tokens": 3}}],
}


@cache
def source() -> LlamaForCausalLM:
    return small_llama(40, 39, pad_token_id=39, intermediate_size=64, num_hidden_layers=4)


def amateur(vocabulary: int = 40, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(7)
    asked = {"pad_token_id": vocabulary - 1, "intermediate_size": 48, "num_hidden_layers": 2}
    return small_llama(vocabulary, vocabulary - 1, **{**asked, **options})


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weak")
    amateur().save_pretrained(folder)
    return folder


def model(target: str, folder: Path, *passes: Any, **options: Any) -> gw.Model:
    recipe = {"name": "contrasted", "extends": "baseline"}
    recipe["passes"] = [{"contrast_model": {"model": str(folder), **options}}, *passes]
    return gw.optimize(source(), gw.Recipe.load(recipe), target=target)


def said(model: LlamaForCausalLM, tokens: list[int], layer: int | None) -> torch.Tensor:
    """Logits behind a text, of a layer's state or of the last one's."""
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        state = states[-1] if layer is None else model.model.norm(states[layer])
        return model.lm_head(state)[0, -1]


def contrasted(folder: Path, tokens: list[int], **options: Any) -> list[float]:
    """The scores behind a text, token by token."""
    other = LlamaForCausalLM.from_pretrained(folder).eval()
    asked = {"keep": 0.0, "weight": 1.0, "lower": 0.0, "temperature": 1.0, "plausible": 0.1}
    asked |= options

    def logs(which: LlamaForCausalLM, layer: int | None, over: float = 1.0) -> list[float]:
        return (said(which, tokens, layer) / over).log_softmax(-1).tolist()

    p, q = logs(source(), None), logs(other, None, asked["temperature"])
    # As many tokens as the amateur knows; of the others it thinks as of its least likely one.
    q += [min(q)] * (len(p) - len(q))
    at, under = options.get("layer", 2), options.get("amateur_layer", 1)
    below = logs(source(), at), logs(other, under, asked["temperature"])
    scores = []
    for token, (mine, theirs) in enumerate(zip(p, q, strict=True)):
        score = asked["keep"] * mine + asked["weight"] * (mine - theirs)
        if asked["lower"]:
            score += asked["lower"] * (below[0][token] - below[1][token])
        least = max(p) + math.log(asked["plausible"]) if asked["plausible"] else -math.inf
        scores.append(score if mine >= least else -math.inf)
    return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "li": {},
    "obrien": {"keep": 1.0, "weight": 0.5},
    "cold": {"temperature": 0.5, "plausible": 0.0},
    "lol": {"lower": 0.5},
    "layers": {"lower": 2.0, "layer": 3, "amateur_layer": 1},
}
CASES = [f"{name}-{where}" for name in OPTIONS for where in ("eager", "onnxruntime", "torch")]


@pytest.mark.parametrize("case", mostly_long(CASES, ["layers-eager"]))
def test_scores_are_the_papers(case: str, weak: Path) -> None:
    name, target = case.split("-")
    where = target if target == "eager" else f"{target}:cpu:float32"
    fast = model(where, weak, **OPTIONS[name])
    text = list(PROMPTS[0])
    for _ in range(NEW):
        scores = contrasted(weak, text, **OPTIONS[name])
        text.append(scores.index(max(scores)))
    found = fast.generate([PROMPTS[0]], max_new_tokens=NEW, eos_token_id=None)
    assert found[0].tolist() == text
    logits = fast([text[:12]])[0, -1].tolist()
    for mine, other in zip(logits, contrasted(weak, text[:12], **OPTIONS[name]), strict=True):
        assert mine == pytest.approx(other, abs=1e-3) if other > -math.inf else mine < -4e3
    plain = gw.optimize(source(), "baseline", target="eager")
    assert plain.generate([PROMPTS[0]], max_new_tokens=NEW, eos_token_id=None)[0].tolist() != text


@pytest.mark.parametrize("name", mostly_long([*DRAFTS], ["chains"]))
def test_drafts_and_few_bits_go_together_with_it(name: str, weak: Path) -> None:
    asked = {"max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True}
    drafts, more = DRAFTS[name], [p for p in DRAFTS[name] if "quantize" in str(p)]
    how = {"lower": 0.5}
    plain = model("eager", weak, *more, **how).generate(torch.tensor(PROMPTS), **asked)
    found = model("eager", weak, *drafts, **how).generate(torch.tensor(PROMPTS), **asked)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert found.stats.draft_tokens > 0


@pytest.mark.long
def test_texts_of_a_batch_of_unequal_lengths_and_artifacts(weak: Path, tmp_path: Path) -> None:
    fast = model("eager", weak, lower=0.5)
    prompts = [PROMPTS[0], PROMPTS[1][:3]]
    asked: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
    found = fast.generate(prompts, **asked)
    for prompt, text in zip(prompts, found.tolist(), strict=True):
        assert text[-8:] == fast.generate([prompt], **asked)[0, -8:].tolist()
    fast.save(tmp_path / "artifact")
    assert torch.equal(gw.load(tmp_path / "artifact").generate(prompts, **asked), found)


def test_a_smaller_vocabulary_and_fewer_positions(tmp_path: Path) -> None:
    """Tokens that the amateur lacks are as unlikely to it as its least likely one."""
    amateur(36, max_position_embeddings=32).save_pretrained(tmp_path)
    fast = model("eager", tmp_path, plausible=0.0)
    for mine, other in zip(
        fast([PROMPTS[1]])[0, -1].tolist(),
        contrasted(tmp_path, PROMPTS[1], plausible=0.0),
        strict=True,
    ):
        assert mine == pytest.approx(other, abs=1e-3)
    assert fast.program.info.context == 32
    assert "texts end at 32 tokens" in " ".join(str(fast.report).split())
    with pytest.raises(InputError, match="32"):
        fast.generate([PROMPTS[0]], max_new_tokens=28, eos_token_id=None)


def test_what_does_not_fit_is_refused() -> None:
    start = tiny_llama(4).replace(guests={"other": tiny_llama(seed=1)})

    def made(*before: Pass, **options: Any) -> Program:
        steps = [*before, ContrastModel(model="other", **options)]
        return run_passes(start, [Step(step) for step in steps])[0]

    assert made(lower=1.0, layer=3).step.weights > {"amateur.layers.1.q", "layers.3.q"}
    for options, message in (
        ({"layer": 4}, r"layer=4: expected 1 to 3: the model has 4 layers"),
        ({"amateur_layer": 2}, r"amateur_layer=2: expected 1 to 1"),
    ):
        with pytest.raises(PassError, match=message):
            made(lower=1.0, **options)
    with pytest.raises(PassError, match=r"expected a step that is one function"):
        made(SkipLayers(layers=(2,), prefill="full"))
    with pytest.raises(PassError, match=r"expected the model 'none' beside the program"):
        ContrastModel(model="none").run(start)
    with pytest.raises(InputError, match=r"contrast_model\.model"):
        gw.optimize(source(), "contrastive_decoding", target="eager")


@pytest.mark.long
def test_other_tokens_are_refused(tmp_path: Path) -> None:
    demo = ROOT / "graftwork" / "demo_model"
    amateur(4096).save_pretrained(tmp_path)
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = sorted(ids, key=ids.__getitem__)[300:302]
    ids[first], ids[second] = ids[second], ids[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = {
        "name": "c",
        "extends": "baseline",
        "passes": [{"contrast_model": {"model": str(tmp_path)}}],
    }
    with pytest.raises(PassError, match=r"the tokenizers of .* differ"):
        gw.optimize(demo, gw.Recipe.load(recipe), target="eager")


def test_guidance_by_another_prompt_is_refused(weak: Path) -> None:
    """What is ruled out behind the one prompt would win behind the other."""
    layers = gw.optimize(source(), "dola", target="eager")
    for contrasting in (model("eager", weak), layers):
        with pytest.raises(InputError, match=r"guidance_scale: .* contrasts logits in its step"):
            contrasting.generate(torch.tensor(PROMPTS), guidance_scale=1.5, do_sample=False)
        assert contrasting.compiled is None
    layers.generate(torch.tensor(PROMPTS), guidance_scale=1.0, do_sample=False, max_new_tokens=1)
