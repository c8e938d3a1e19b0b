"""A reference model that replaces what only the target finds likely: the paper's words as loops."""

from __future__ import annotations

import copy
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import build
from kept_texts import check_kept
from recorded import calls_of
from recurrent_archs import RECURRENT
from selection import mostly_long
from small_llama import small_llama
from test_runtime_sampling import assert_distributed
from test_serving_engine import served
from transformers import LlamaForCausalLM

import graftwork as gw
from graftwork.ir import GraftworkWarning, InputError, PassError, UnsupportedError
from graftwork.runtime.speculate.verifiers.suspicion import suspicious

PROMPTS = [[5, 6, 7, 5, 6, 9, 5, 6], [11, 3, 11, 3, 12]]
NEW, ALPHA = 20, 3.0
PLAIN: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}
OWN: list[Any] = [{"draft_own": {"levels": 3}}]


@cache
def source() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return small_llama(40, 39, pad_token_id=39, intermediate_size=64, num_hidden_layers=3)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    reference().save_pretrained(folder)
    return folder


@cache
def reference() -> LlamaForCausalLM:
    """The source with other weights in its last layer."""
    other = copy.deepcopy(source())
    torch.manual_seed(7)
    for weight in other.model.layers[-1].parameters():
        weight.data += 0.7 * weight.data.std() * torch.randn_like(weight)
    return other


def model(folder: Path, *passes: Any, target: str = "eager", alpha: float = ALPHA) -> gw.Model:
    recipe: dict[str, Any] = {"name": "checked", "extends": "baseline"}
    recipe["passes"] = [{"verify_suspicion": {"model": str(folder), "alpha": alpha}}, *passes]
    return gw.optimize(source(), gw.Recipe.load(recipe), target=target)


def said(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].softmax(-1)


def by_hand(
    prompt: list[int], k: int = 4, alpha: float = ALPHA, pair: Any = None
) -> tuple[list[int], int]:
    """Greedy tokens, and how many of them the reference chose: k of the target, all of them judged,
    the first suspicious one replaced and those behind it forgotten. pair: the two models."""
    target, other = pair or (source(), reference())
    text, replaced = list(prompt), 0
    while len(text) < len(prompt) + NEW:
        begun = len(text)
        for _ in range(k):
            text.append(int(said(target, text).argmax()))
        for place in range(begun, len(text)):
            p, q = said(target, text[:place]), said(other, text[:place])
            if p[text[place]] / q[text[place]] >= alpha:
                text = [*text[:place], int(q.argmax())]
                replaced += 1
                break
    return text[len(prompt) : len(prompt) + NEW], replaced


DRAFTS: dict[str, list[Any]] = {
    "none": [],
    "own": OWN,
    "suffix": [{"draft_suffix": {"tokens": 3, "shortest": 1}}],
    "trees": ["accept_trees", "add_top_tokens", "draft_recycling"],
}
TARGETS = ["eager", "onnxruntime:cpu:float32", "torch:cpu:float32"]
CASES = [f"{name}-{target}" for name in DRAFTS for target in TARGETS]


@pytest.mark.parametrize(
    "case", mostly_long(CASES, ["own-eager", f"own-{TARGETS[1]}", "none-eager", "trees-eager"])
)
def test_texts_are_the_papers_whatever_drafts(case: str, clean: Path) -> None:
    """Every token is checked, the first one and those behind the last whole draft included."""
    name, target = case.split("-")
    fast = model(clean, *DRAFTS[name], target=target)
    found = fast.generate([*PROMPTS], return_dict_in_generate=True, **PLAIN)
    for row, prompt in zip(found.sequences.tolist(), PROMPTS, strict=True):
        wanted, replaced = by_hand(prompt)
        assert row[-NEW:] == wanted and by_hand(prompt, k=1)[0] == wanted
        assert 1 < replaced < NEW - 5
    assert (found.stats.accepted_tokens > 0) == (name != "none")


@pytest.mark.parametrize(
    "case", mostly_long(["none-eager", "suffix-eager", f"suffix-{TARGETS[1]}"], ["suffix-eager"])
)
def test_targets_with_recurrences_are_checked(case: str, tmp_path: Path) -> None:
    """But do not write ahead."""
    name, target = case.split("-")
    recurrent = build(RECURRENT["qwen3_next"])
    other = small_llama(recurrent.config.vocab_size, 0, pad_token_id=0)
    other.save_pretrained(tmp_path)
    passes = [{"verify_suspicion": {"model": str(tmp_path), "alpha": 1.2}}, *DRAFTS[name]]
    recipe = {"name": "checked", "extends": "baseline", "passes": passes}
    fast = gw.optimize(recurrent, gw.Recipe.load(recipe), target=target)
    found = fast.generate([*PROMPTS], pad_token_id=0, **PLAIN)
    for row, prompt in zip(found.tolist(), PROMPTS, strict=True):
        assert row[-NEW:] == by_hand(prompt, 1, 1.2, (recurrent, other))[0]
    with pytest.raises(PassError, match=r"draft_own: .* has recurrences"):
        gw.optimize(recurrent, gw.Recipe.load({**recipe, "passes": [*passes[:1], *OWN]}))


def test_suspicious_tokens_by_hand() -> None:
    """As likely as alpha times is suspicious; what the reference holds impossible is, too."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.0625, 0.9375, 0.0]])
    found = [suspicious(p.log(), q.log(), alpha).tolist()[0] for alpha in (0.1, 7.9, 8.1, 1e9)]
    assert found[0] == [True, True, True]
    assert found[1:] == [[True, False, True], [False, False, True], [False, False, True]]
    for broken in ((p.log() * math.nan, q.log()), (p.log(), q.log() * math.nan)):
        with pytest.raises(InputError, match="NaN"):
            suspicious(*broken, 20.0)


def test_the_target_runs_once_and_the_reference_for_several(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is suspicious: of four tokens the target makes each in a call of its own."""
    fast = model(clean, *OWN, alpha=1e9)
    called = calls_of(fast.executable, monkeypatch)
    found = fast.generate([PROMPTS[0]], return_dict_in_generate=True, **PLAIN)
    plain = gw.optimize(source(), "baseline", target="eager")
    assert found.sequences.tolist() == plain.generate([PROMPTS[0]], **PLAIN).tolist()
    assert called.count("step") == NEW
    assert called.count("reference") == 1 + math.ceil((NEW - 1) / 4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["none", "own"])
def test_sampling_draws_from_the_reference_where_the_target_is_suspicious(
    name: str, clean: Path
) -> None:
    """Token x with p(x), if it is not suspicious, and with q(x) what the others have of p."""
    fast, prompt = model(clean, *DRAFTS[name], alpha=1.5), PROMPTS[1]
    asked: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None, "do_sample": True}
    rows = fast.generate([prompt] * 3000, seed=1, top_k=0, **asked).tolist()
    p, q = said(source(), prompt), said(reference(), prompt)
    wrong = p / q >= 1.5
    shares = torch.where(wrong, 0, p) + p[wrong].sum() * q
    assert 0.05 < float(p[wrong].sum()) < 0.9
    assert_distributed(
        Counter((row[len(prompt)],) for row in rows),
        {(t,): float(share) for t, share in enumerate(shares)},
    )
    first = max(range(40), key=shares.tolist().__getitem__)
    text = [*prompt, first]
    p, q = said(source(), text), said(reference(), text)
    shares = torch.where(p / q >= 1.5, 0, p) + p[p / q >= 1.5].sum() * q
    assert_distributed(
        Counter((row[-1],) for row in rows if row[-2] == first),
        {(t,): float(share) for t, share in enumerate(shares)},
    )


def test_options_bind_the_reference_too(clean: Path) -> None:
    """A token that a call forbids is none that replaces; scores are those that tokens came by."""
    fast = model(clean, *OWN, alpha=1e-9)  # everything is suspicious: the reference writes
    plain = fast.generate([PROMPTS[0]], **PLAIN)[0, 8:].tolist()
    text = list(PROMPTS[0])
    for _ in range(NEW):
        text.append(int(said(reference(), text).argmax()))
    assert plain == text[8:]
    told: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    found = fast.generate([PROMPTS[0]], suppress_tokens=[plain[0]], **told, **PLAIN)
    row = found.sequences[0, 8:].tolist()
    assert plain[0] not in row
    assert [int(scores[0].argmax()) for scores in found.scores] == row
    sampled = fast.generate([PROMPTS[0]], do_sample=True, top_k=1, seed=0, **PLAIN)
    assert sampled[0, 8:].tolist() == plain


@pytest.mark.parametrize("name", mostly_long(["int4", "cache"], ["int4"]))
def test_artifacts_few_bits_streams_and_turns(name: str, clean: Path, tmp_path: Path) -> None:
    passes = {"int4": "quantize_weights", "cache": "quantize_cache"}
    fast = model(clean, passes[name], *OWN)
    asked = {"max_new_tokens": 8, "eos_token_id": None}
    found = fast.generate([*PROMPTS], **asked)
    assert torch.equal(model(clean, passes[name]).generate([*PROMPTS], **asked), found)
    check_kept(fast, PROMPTS, 8, tmp_path)


def test_a_smaller_vocabulary_is_suspicious_beyond_its_end(tmp_path: Path) -> None:
    torch.manual_seed(7)
    small_llama(36, 35, pad_token_id=35, num_hidden_layers=1).save_pretrained(tmp_path)
    fast = model(tmp_path, *OWN, alpha=1e9)
    assert int(fast.generate([*PROMPTS], **PLAIN)[:, 8:].max()) < 36


@pytest.mark.untrained
def test_untrained_drafters_leave_the_checks_in_place(clean: Path) -> None:
    """A plan that drafts nothing, because nobody trained its heads, still checks."""
    fast = model(clean, "draft_medusa", "length_goodput")
    with pytest.warns(GraftworkWarning, match="untrained"):
        found = fast.generate([PROMPTS[0]], **PLAIN)
    assert found[0, 8:].tolist() == by_hand(PROMPTS[0])[0]


@pytest.mark.parametrize("name", mostly_long(["none", "own"], ["own"]))
def test_requests_that_share_steps_are_checked(name: str, clean: Path) -> None:
    fast = model(clean, *DRAFTS[name], target="onnxruntime:cpu:float32")
    clients, _ = served(fast, [(prompt, {**PLAIN, "do_sample": False}) for prompt in PROMPTS])
    assert [client.tokens for client in clients] == [by_hand(prompt)[0] for prompt in PROMPTS]


def test_refusals(clean: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs another model"):
        gw.optimize(source(), "cleangen", target="eager")
    for alpha in (0.0, -1.0, math.inf):
        with pytest.raises(InputError, match="alpha"):
            model(clean, alpha=alpha)
    cut = {"name": "cut", "extends": "baseline", "passes": []}
    cut["passes"] = ["cut_depth", {"verify_suspicion": {"model": str(clean)}}]
    with pytest.raises((PassError, InputError), match="a plan whose step is one function"):
        gw.optimize(source(), gw.Recipe.load(cut), target="eager")
    alone = {"name": "alone", "extends": "baseline", "passes": ["draft_own"]}
    with pytest.raises(PassError, match="none reads along"):
        gw.optimize(source(), gw.Recipe.load(alone), target="eager")
    with pytest.raises(PassError, match="a verifier already"):
        model(clean, "draft_suffix", "verify_typical")
    fast = model(clean)
    with pytest.raises(UnsupportedError, match="has another model read along"):
        fast.export_onnx(tmp_path / "onnx")
    with pytest.raises(InputError, match="verify=suspicion"):
        fast.generate([PROMPTS[0]], num_beams=2, **PLAIN)
    rows = torch.zeros(1, 3, source().config.hidden_size)
    with pytest.raises(InputError, match="verify=suspicion"):
        fast.generate(inputs_embeds=rows, **PLAIN)
