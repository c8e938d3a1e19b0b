"""Layers that are contrasted (DoLa): the method's own words as loops, and drafts over it."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from selection import mostly_long
from small_llama import small_llama
from transformers import LlamaForCausalLM

import graftwork as gw
from graftwork.exporting.gguf import check_passes
from graftwork.ir import PassError, UnsupportedError
from graftwork.passes.stepping.contrast_layers import ContrastLayers
from graftwork.passes.stepping.pick_logits import PickLogits

PROMPTS = [[5, 6, 7, 5, 6, 9, 5, 6], [11, 3, 11, 3, 12, 11, 3, 11]]
NEW = 20
DRAFTS: list[Any] = ["accept_trees", "add_top_tokens", "draft_recycling", "length_goodput"]


@cache
def source() -> LlamaForCausalLM:
    return small_llama(40, 39, pad_token_id=39, intermediate_size=64, num_hidden_layers=6)


def model(target: str, *passes: Any, **options: Any) -> gw.Model:
    recipe = {"name": "contrasted", "extends": "baseline"}
    recipe["passes"] = [{"contrast_layers": options}, *passes]
    return gw.optimize(source(), gw.Recipe.load(recipe), target=target)


def entropy(chances: list[float]) -> float:
    return -sum(p * math.log(p) for p in chances if p > 0)


def contrasted(tokens: list[int], layers: tuple[int, ...], plausible: float) -> list[float]:
    """The scores behind a text, from the paper."""
    with torch.no_grad():
        states = source()(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        last = source().lm_head(states[-1])[0, -1].softmax(-1).tolist()
        early = [
            source().lm_head(source().model.norm(states[n]))[0, -1].softmax(-1).tolist()
            for n in layers
        ]

    def divergence(other: list[float]) -> float:
        mixed = [(p + q) / 2 for p, q in zip(last, other, strict=True)]
        return entropy(mixed) - (entropy(last) + entropy(other)) / 2

    far = max(early, key=divergence)
    pairs = zip(last, far, strict=True)
    least = plausible * max(last)
    return [math.log(p / q) if p >= least else -math.inf for p, q in pairs]


OPTIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "high": ({}, (3, 5)),
    "low": ({"layers": "low"}, (2,)),
    "three": ({"layers": [2, 3, 5]}, (2, 3, 5)),
}
CASES = [f"{name}-{where}" for name in OPTIONS for where in ("eager", "onnxruntime", "torch")]


@pytest.mark.parametrize("case", mostly_long(CASES, ["three-eager", "high-onnxruntime"]))
def test_scores_are_the_papers(case: str) -> None:
    name, target = case.split("-")
    options, layers = OPTIONS[name]
    where = target if target == "eager" else f"{target}:cpu:float32"
    fast = model(where, **options)
    text = list(PROMPTS[0])
    for _ in range(NEW):
        scores = contrasted(text, layers, 0.1)
        text.append(scores.index(max(scores)))
    found = fast.generate([PROMPTS[0]], max_new_tokens=NEW, eos_token_id=None)
    assert found[0].tolist() == text
    logits = fast([text[:12]])[0, -1].tolist()
    for mine, other in zip(logits, contrasted(text[:12], layers, 0.1), strict=True):
        assert mine == pytest.approx(other, abs=1e-3) if other > -math.inf else mine < -5e3
    plain = gw.optimize(source(), "baseline", target="eager")
    assert plain.generate([PROMPTS[0]], max_new_tokens=NEW, eos_token_id=None)[0].tolist() != text


@pytest.mark.parametrize("bits", mostly_long(["floats", "int4"], ["floats"]))
def test_drafts_and_few_bits_go_together_with_it(bits: str) -> None:
    asked = {"max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True}
    more: list[Any] = [] if bits == "floats" else [{"quantize_weights": {}}]
    plain = model("eager", *more).generate(torch.tensor(PROMPTS), **asked)
    found = model("eager", *more, *DRAFTS).generate(torch.tensor(PROMPTS), **asked)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert found.stats.draft_tokens > 0


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(PassError, match=r"expected some of 1 to 5, each once: the model has 6"):
        model("eager", layers=[2, 2])


def test_a_gguf_file_cannot_say_a_contrast() -> None:
    check_passes([PickLogits])
    with pytest.raises(UnsupportedError, match=r"the pass contrast_layers changes \(logits\)"):
        check_passes([ContrastLayers])
