"""Tokens chosen by what becomes of the text with them: Transfer Q*, as loops over models."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_texts import check_kept
from selection import mostly_long
from test_rewarded import END, NEW, PROMPTS, drafter, judge, next_of, target
from test_rewarded import folders as folders
from test_runtime_sampling import assert_distributed

import graftwork as gw
from graftwork.ir import InputError, PassError

PLAIN: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}
WIDTH, DEPTH = 4, 3


def model(
    folders: Path,
    *more: str,
    alpha: float = 1.0,
    on: str = "eager",
    kind: str = "score",
    widths: tuple[int, ...] = (WIDTH, *[1] * (DEPTH - 1)),
) -> gw.Model:
    passes: list[Any] = [
        *more,
        {"verify_valued": {"model": str(folders / kind), "alpha": alpha}},
        {"draft_model": {"model": str(folders / "draft"), "levels": DEPTH}},
        *("accept_trees", {"tree_sampled": {"widths": list(widths)}}, "draft_target_first"),
    ]
    recipe = gw.Recipe.load({"name": "valued", "extends": "baseline", "passes": passes})
    return gw.optimize(folders / "target", recipe, target=on)


def said(model: Any, text: list[int]) -> torch.Tensor:
    """Log probabilities of the token after a text."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text])).logits[0, -1]
    return logits.log_softmax(-1)


def worth(text: list[int], kind: str) -> float:
    """The reward model's score, or log odds."""
    with torch.no_grad():
        scores = judge(kind)(input_ids=torch.tensor([text])).logits[0]
    return float(scores[0] if kind == "score" else scores[-1][1] - scores[-1][0])


def value(text: list[int], token: int, room: int, kind: str, ends: tuple[int, ...] = ()) -> float:
    """Of a token: the reward of the text as the aligned model writes it on."""
    text = [*text, token]
    for _ in range(min(DEPTH, room) - 1):
        if text[-1] in ends:
            break
        text.append(next_of(drafter(), text))
    return worth(text, kind)


def by_hand(prompt: list[int], alpha: float, kind: str, new: int = NEW) -> list[int]:
    """The paper's Algorithm 1, taking the best token. The first one is the target's, and the second
    one of the aligned model's candidates."""
    text, candidates = [*prompt, next_of(target(), prompt)], drafter()
    while len(text) < len(prompt) + new:
        likely = said(candidates, text).topk(WIDTH).indices.tolist()
        chances, room = said(target(), text), len(prompt) + new - len(text)
        weights = [float(chances[z]) + value(text, z, room, kind) / alpha for z in likely]
        text.append(likely[weights.index(max(weights))])
        candidates = target()
    return text[len(prompt) :]


CASES = ["score-eager", "labels-eager", "score-onnxruntime:cpu:float32", "score-torch:cpu:float32"]


@pytest.mark.parametrize("case", mostly_long(CASES, [*CASES[:1], CASES[2]]))
def test_texts_are_the_papers(case: str, folders: Path) -> None:
    """Alone and side by side, under rewards that change the text."""
    kind, on = case.split("-")
    fast = model(folders, alpha=0.3, on=on, kind=kind)
    wanted = [by_hand(prompt, 0.3, kind) for prompt in PROMPTS]
    plain = gw.optimize(folders / "target", "baseline", target="eager")
    own = plain.generate([*PROMPTS], **PLAIN)[:, -NEW:].tolist()
    assert sum(text != other for text, other in zip(wanted, own, strict=True)) > 2
    rows = fast.generate([*PROMPTS], **PLAIN)[:, -NEW:].tolist()
    assert rows == wanted
    assert [fast.generate([p], **PLAIN)[0, len(p) :].tolist() for p in PROMPTS] == wanted


def test_the_ends_of_alpha(folders: Path) -> None:
    """Without a say of the reward the model decides among the candidates, of which its own best
    token is one; with nothing but that, the reward decides."""
    own = gw.optimize(folders / "target", "baseline", target="eager").generate(
        [PROMPTS[0]], **PLAIN
    )
    found = model(folders, alpha=1e6).generate([PROMPTS[0]], **PLAIN)
    text = own[0].tolist()
    second = text[: len(PROMPTS[0]) + 1]
    assert next_of(target(), second) in said(drafter(), second).topk(WIDTH).indices
    assert torch.equal(found, own)
    led = model(folders, alpha=1e-4).generate([PROMPTS[0]], **PLAIN)[0].tolist()
    for at in range(len(PROMPTS[0]) + 2, len(led)):
        likely = said(target(), led[:at]).topk(WIDTH).indices.tolist()
        scores = {z: value(led[:at], z, len(led) - at, "score") for z in likely}
        assert led[at] == max(scores, key=lambda z: scores[z])


def test_a_text_that_ends_is_rewarded_where_it_ends(folders: Path) -> None:
    """What the aligned model would write behind an end is no part of the text."""
    prompt, ends = PROMPTS[0], tuple(range(0, 40, 2))
    fast = model(folders, alpha=0.05)
    text, candidates = [*prompt, next_of(target(), prompt)], drafter()
    while text[-1] not in ends and len(text) < len(prompt) + NEW:
        likely = said(candidates, text).topk(WIDTH).indices.tolist()
        room = len(prompt) + NEW - len(text)
        weights = [
            float(said(target(), text)[z]) + value(text, z, room, "score", ends) / 0.05
            for z in likely
        ]
        text.append(likely[weights.index(max(weights))])
        candidates = target()
    found = fast.generate([prompt], max_new_tokens=NEW, eos_token_id=list(ends), pad_token_id=END)
    assert found[0].tolist()[: len(text)] == text


def test_tokens_are_drawn_by_both(folders: Path) -> None:
    """With as many candidates as there are tokens, the second token's distribution is the target's
    times exp(value / alpha)."""
    fast, prompt = model(folders, widths=(40,), alpha=0.5), PROMPTS[1]
    asked: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None, "do_sample": True}
    rows = fast.generate([prompt] * 1000, seed=1, top_k=0, **asked).tolist()
    first = Counter(row[-3] for row in rows).most_common(1)[0][0]
    text = [*prompt, first]
    weights = [
        math.exp(float(chance) + worth([*text, token], "score") / 0.5)
        for token, chance in enumerate(said(target(), text))
    ]
    wanted = {(token,): weight / sum(weights) for token, weight in enumerate(weights)}
    assert_distributed(Counter((row[-2],) for row in rows if row[-3] == first), wanted)


def test_options_bind_candidates_too(folders: Path) -> None:
    """What a call forbids is not chosen; where it forbids all candidates the model's own is."""
    fast, prompt = model(folders, alpha=0.01), PROMPTS[0]
    first = fast.generate([prompt], **PLAIN)[0, 8:].tolist()
    told: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    found = fast.generate([prompt], suppress_tokens=[first[2]], **told, **PLAIN)
    assert first[2] not in found.sequences[0, 8:].tolist()
    assert len(found.scores) == NEW
    likely = said(drafter(), [*prompt, first[0]]).topk(WIDTH).indices.tolist()
    others = [token for token in range(40) if token not in likely]
    chances = said(target(), [*prompt, first[0]])
    best = max(others, key=lambda token: float(chances[token]))
    asked = {**PLAIN, "max_new_tokens": 2, "suppress_tokens": likely}
    if first[0] not in likely:
        assert fast.generate([prompt], **asked)[0, -1] == best


@pytest.mark.parametrize("name", mostly_long(["int4", "cache"], ["int4"]))
def test_artifacts_few_bits_streams_and_turns(name: str, folders: Path, tmp_path: Path) -> None:
    passes = {"int4": "quantize_weights", "cache": "quantize_cache"}
    check_kept(model(folders, passes[name]), PROMPTS, 12, tmp_path)


def test_the_recipe_by_name(folders: Path) -> None:
    recipe = gw.Recipe.load("transfer_q").with_options([f"verify_valued.model={folders / 'score'}"])
    fast = gw.optimize(folders / "target", recipe, draft=folders / "draft", target="eager")
    assert fast.generate([PROMPTS[0]], **PLAIN).shape == (1, 8 + NEW)
    assert fast.executable.program.plan.most == 160


def test_refusals(folders: Path) -> None:
    with pytest.raises(InputError, match="verify_valued"):
        gw.optimize(folders / "target", "transfer_q", draft=folders / "draft", target="eager")
    passes: list[Any] = [
        {"verify_valued": {"model": str(folders / "score")}},
        {"draft_model": {"model": str(folders / "draft")}},
    ]
    recipe: dict[str, Any] = {"name": "no", "extends": "baseline", "passes": passes}
    with pytest.raises(PassError, match="begins otherwise: run draft_target_first"):
        gw.optimize(folders / "target", gw.Recipe.load(recipe), target="eager")
    more = ["accept_trees", "tree_sampled", "draft_target_first", "length_earned"]
    recipe["passes"] = [*passes, *more]
    with pytest.raises(PassError, match="gives such drafts up: leave that out"):
        gw.optimize(folders / "target", gw.Recipe.load(recipe), target="eager")
