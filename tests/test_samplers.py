"""Samplers that follow a text, selective guidance, and the first of several texts to end."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from small_llama import small_llama

import graftwork as gw
from graftwork.ir import GraftworkWarning, InputError
from graftwork.runtime.asking.guides import guided
from graftwork.runtime.asking.samplers import FORGET, Trail, depth

PROMPTS = [[5, 6, 7, 5, 6, 9, 5, 6], [11, 3, 11, 3, 12, 11, 3, 11]]
END = 39
DRAWN = {"do_sample": True, "seed": 3, "top_k": 0}
ASKED: dict[str, dict[str, Any]] = {
    "mirostat": {"logits_processor": [gw.Mirostat(tau=2.5, eta=0.3)], **DRAWN},
    "momentum": {"logits_processor": gw.Momentum(), "do_sample": False},
    "look back": {"logits_processor": [gw.LookBack(alpha=1.0, k=3)], **DRAWN},
    "look back for a while": {"logits_processor": [gw.LookBack(2.0, 3, window=2)], **DRAWN},
    "both": {"logits_processor": [gw.LookBack(1.0), gw.Mirostat(1.0)], **DRAWN},
    "plausible": {
        "guidance_scale": 1.5,
        "guidance_plausible": 0.3,
        "negative_prompt_ids": torch.tensor([[1, 2], [3, 4]]),
    },
}


@cache
def model(recipe: str) -> gw.Model:
    sizes = {"intermediate_size": 48, "max_position_embeddings": 128}
    source = small_llama(40, END, pad_token_id=END, **sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftworkWarning)  # of untrained heads
        return gw.optimize(source, recipe, target="eager")


def generated(recipe: str, prompts: list[list[int]] = PROMPTS, **options: Any) -> Any:
    asked = {"max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True, **options}
    return model(recipe).generate(torch.tensor(prompts), **asked)


@pytest.mark.parametrize("recipe", ["copyspec", "recycling", "medusa"])
def test_drafts_change_no_text(recipe: str) -> None:
    drafted = 0
    for name, asked in ASKED.items():
        plain, found = generated("baseline", **asked), generated(recipe, **asked)
        assert found.sequences.tolist() == plain.sequences.tolist(), name
        drafted += found.stats.draft_tokens
    assert drafted > 0


@pytest.mark.parametrize("name", ["momentum", "plausible"])
def test_a_text_of_a_batch_is_what_it_is_alone(name: str) -> None:
    whole = generated("baseline", **ASKED[name]).sequences
    for index, prompt in enumerate(PROMPTS):
        asked = dict(ASKED[name])
        if "negative_prompt_ids" in asked:
            asked["negative_prompt_ids"] = asked["negative_prompt_ids"][index : index + 1]
        alone = generated("baseline", [prompt], **asked).sequences
        assert alone[0].tolist() == whole[index].tolist()


def test_mirostat_bounds_surprise_by_what_was_drawn() -> None:
    """The scores of every step, by the paper's rule written out."""
    tau, eta = 2.5, 0.3
    asked = {**DRAWN, "logits_processor": [gw.Mirostat(tau, eta)], "temperature": 1.0}
    found = generated("copyspec", PROMPTS[:1], **asked, output_scores=True, output_logits=True)
    mu, cut = 2 * tau, 0
    for step, token in enumerate(found.sequences[0, len(PROMPTS[0]) :].tolist()):
        bits = [-x / math.log(2) for x in found.logits[step][0].log_softmax(-1).tolist()]
        kept = [i for i, x in enumerate(bits) if x <= mu] or [bits.index(min(bits))]
        scores = found.scores[step][0]
        assert (scores > -5e3).nonzero()[:, 0].tolist() == kept
        mass = sum(2 ** -bits[i] for i in kept)
        assert token in kept
        mu -= eta * (bits[token] + math.log2(mass) - tau)
        cut += len(bits) - len(kept)
    assert cut > 0


def test_surprise_comes_near_its_target() -> None:
    means = []
    for tau in (1.0, 3.0):
        asked = {**DRAWN, "logits_processor": [gw.Mirostat(tau)], "output_logits": True}
        asked["max_new_tokens"] = 60
        found = generated("baseline", PROMPTS[:1], **asked)
        new = found.sequences[0, len(PROMPTS[0]) :]
        rows = torch.stack([row[0] for row in found.logits]).log_softmax(-1) / -math.log(2)
        means.append(rows.gather(1, new[:, None]).mean().item())
    assert means[0] < means[1] - 0.5


def test_momentum_leaves_loops() -> None:
    """Depths by hand; and of a text that runs in a circle, less is said again."""
    text = [1, 2, 3, 7, 1, 2]
    assert [depth(text, token, 4) for token in (3, 1, 9)] == [3, 1, 0]
    assert depth(text, 3, 2) == 2 and depth([], 1, 4) == 0
    scores = torch.full((1, 10), -9.0)
    scores[0, [3, 8]] = torch.tensor([2.0, 1.5])
    chances = scores[0].softmax(-1)
    made = gw.Momentum(alpha=0.2, k=2).of(0)(torch.tensor([text]), scores.clone())
    assert made.argmax() == 8  # 3 is at depth 3
    assert made[0, 3].item() == pytest.approx(chances[3].item() - 0.2 * 4.0)
    assert made[0, 8].item() == pytest.approx(chances[8].item())
    fresh = gw.Momentum().of(0)(torch.tensor([[1, 2]]), scores.clone())
    assert torch.equal(fresh, scores)
    plain, moved = walked(None), walked(gw.Momentum().of(3))
    assert distinct(plain) == 3 and distinct(moved) > 12


def walked(processor: Any) -> list[int]:
    """What a model writes that would go 1, 2, 3, 1, 2, 3, ... if it were let."""
    torch.manual_seed(0)
    text = [1, 2, 3]
    for _ in range(30):
        scores = torch.randn(1, 40)
        scores[0, text[-1] % 3 + 1 if text[-1] < 4 else 1] = 5.0
        if processor is not None:
            scores = processor(torch.tensor([text]), scores)
        text.append(int(scores.argmax()))
    return text


def distinct(row: list[int]) -> int:
    return len({tuple(row[i : i + 3]) for i in range(len(row) - 2)})


def test_look_back_samples_only_near_what_was() -> None:
    plain = generated("baseline", do_sample=False).sequences.tolist()
    never = {**DRAWN, "logits_processor": [gw.LookBack(alpha=0.0)]}
    assert generated("baseline", **never).sequences.tolist() == plain
    always = {**DRAWN, "logits_processor": [gw.LookBack(alpha=1e9, k=3)]}
    found = generated("baseline", PROMPTS[:1], **always, output_scores=True)
    kept = [int((row[0] > -5e3).sum()) for row in found.scores]
    assert kept == [1, *[3] * 23]
    follow = gw.LookBack(alpha=0.1, k=2, window=1).of(1)
    one, other = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[0.0, 1.0, 3.0]])
    kept = []
    for text, row in (([7], one), ([7, 0], other), ([7, 0, 2], other), ([7, 0, 2, 2], one)):
        scores = follow(torch.tensor([text]), row.clone())
        kept.append(int((scores > -5e3).sum()))
    assert kept == [1, 1, 2, 1]  # `one` is out of the window by then


def test_prefixes_of_drafts_are_forgotten() -> None:
    trail = Trail[int](0)
    text = list(range(2 * FORGET))
    trail.at([0, 99]).state = 1
    trail.at(text[:3]).state = 2
    assert trail.at([0, 99]).state == 1
    trail.at(text)
    assert trail.at(text[:3]).state == 2 and len(trail.root.children[0].children) == 1


def test_guidance_is_selective() -> None:
    own, away = torch.tensor([[2.0, 1.0, -3.0], [0.0, 0.0, 0.0]]), torch.tensor([[2.0, 0.0, -9.0]])
    plain = guided(own, away, 1.5)
    assert torch.isfinite(plain).all()
    cut = guided(own, away, 1.5, plausible=0.1)
    assert torch.isinf(cut).tolist() == [[False, False, True], [False] * 3]
    assert torch.equal(cut[~torch.isinf(cut)], plain[~torch.isinf(cut)])
    unsure = guided(own, away, 1.5, uncertain=0.9)
    assert torch.equal(unsure[0], own[0].log_softmax(-1)) and torch.equal(unsure[1], plain[1])
    rest = {"negative_prompt_ids": torch.tensor([[1, 2], [3, 4]])}
    never = generated("copyspec", guidance_scale=3.0, guidance_uncertain=1.0, **rest)
    assert never.sequences.tolist() == generated("baseline").sequences.tolist()
    with pytest.raises(InputError, match="guidance_plausible has no effect: give guidance_scale"):
        generated("baseline", guidance_plausible=0.1)


@pytest.mark.parametrize("recipe", ["baseline", "copyspec"])
def test_the_first_text_that_ends_ends_the_rest(recipe: str) -> None:
    asked = {"num_return_sequences": 4, "do_sample": True, "seed": 1, "eos_token_id": END}
    asked |= {"max_new_tokens": 80, "pad_token_id": 0, "temperature": 3.0}
    free = new_tokens(generated(recipe, **asked))
    raced = new_tokens(generated(recipe, first_finish=True, **asked))
    for first in (0, 4):
        rows = raced[first : first + 4]
        won = min(len(row) for row in rows if row[-1] == END)
        assert sum(row[-1] == END for row in rows) >= 1
        assert max(map(len, rows)) <= (won + 1 if recipe == "baseline" else 80)
        for row, whole in zip(rows, free[first : first + 4], strict=True):
            assert len(row) <= len(whole)
    assert sum(map(len, raced)) < sum(map(len, free))


def new_tokens(found: Any) -> list[list[int]]:
    rows = found.sequences[:, len(PROMPTS[0]) :].tolist()
    rows = [row[: row.index(END) + 1] if END in row else row for row in rows]
    return [[token for token in row if token != 0] for row in rows]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gw.Mirostat(tau=0), "Mirostat: tau: expected a number from 0.01 to 100, got 0"),
        (lambda: gw.Mirostat(eta="x"), "eta: expected a number from 0 to 1, got 'x'"),  # type: ignore[arg-type]
        (lambda: gw.Momentum(resistance=()), "resistance: expected numbers of at least 0"),
        (lambda: gw.LookBack(alpha=math.nan), "alpha: expected a number from 0 on, got nan"),
        (lambda: gw.LookBack(k=0), "k: expected a number from 1 to 1000, got 0"),
        (
            lambda: generated("baseline", num_beams=2, logits_processor=[gw.Momentum()]),
            "Momentum follows one text, and num_beams has several",
        ),
        (lambda: gw.Mirostat()(torch.ones(1, 1), torch.ones(1, 1)), "give it as logits_processor"),
        (lambda: generated("baseline", first_finish=True), "first_finish: expected several texts"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
