"""Lexical units: several tokens that the target is sure of at once, taken as they are."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_front_door import ROOT
from tiny import MASK, PROMPTS, drafting_llama, named
from whole_drafters import EAGER

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError
from graftwork.ir.execution.executable import Executable
from graftwork.passes.drafting.lexical import LexicalDraft, unit_length
from graftwork.passes.drafting.lexical.graph import DraftLexical
from graftwork.passes.drafting.lexical.objective import (
    chances,
    lexical_loss,
    unit_places,
    within,
)
from graftwork.passes.drafting.ppd.graph import DraftPpd
from graftwork.passes.engine.base import Pass
from graftwork.runtime.generation import generate
from graftwork.training import train_target
from graftwork.training.objectives.base import Batch

DEMO = ROOT / "graftwork" / "demo_model"
SURE = 0.045
"""A random model's likeliest of 32 tokens has about 0.05."""
ASKED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
VOUCHED = named("verify_vouched")


def pads(sure: float = SURE, **more: Any) -> DraftLexical:
    return DraftLexical(prompts=3, candidates=4, sure=sure, **more)


@cache
def compiled(backend: str, *passes: Pass) -> Executable:
    return compile(drafting_llama(*passes), Target(backend, "cpu"))


def decoded(executable: Executable, **more: Any) -> Any:
    asked = {"attention_mask": MASK, "return_dict_in_generate": True, **ASKED, **more}
    return generate(executable, PROMPTS, **asked)


# -- the rule


@pytest.mark.parametrize(
    ("first", "tokens", "scores", "length"),
    [
        (0.9, [1, 2, 3], [0.9, 0.95, 0.9], 3),  # the threshold itself is enough
        (0.9, [1, 2, 3], [0.9, 0.89, 0.99], 1),  # nothing behind an unsure one counts
        (0.89, [1, 2, 3], [0.99, 0.99, 0.99], 0),  # nor behind an unsure next token
        (0.9, [1, 1, 3], [0.99, 0.99, 0.99], 1),  # a token again
        (0.9, [-1, -1, -1], [0.99, 0.99, 0.99], 0),  # nothing was asked
    ],
)
def test_a_unit_by_hand(first: float, tokens: list[int], scores: list[float], length: int) -> None:
    told = np.array(tokens), np.log(np.array(scores, dtype=np.float32))
    assert unit_length(math.log(first), *told, 0.9) == length


def units(executable: Executable, text: list[int], new: int) -> list[int]:
    """The method's own loop: whole texts, with three [PAD] tokens behind them."""
    made: list[int] = []
    while len(made) < new:
        fed = torch.tensor([[*text, *made, 32, 32, 32]])
        executable.begin(1, fed.shape[1])
        steps = torch.arange(fed.shape[1])[None]
        inputs = {"tokens": fed, "positions": steps, "past": torch.zeros(1, dtype=torch.int64)}
        outputs = executable.run("step", {**inputs, "select": steps}, ("logits",))
        probs = outputs["logits"][0, -4:].softmax(-1)
        sure, said = probs.max(-1).values.tolist(), probs.argmax(-1).tolist()
        count = 1
        if sure[0] >= SURE:  # else the next token alone
            while (
                count < 4 and sure[count] >= SURE and (count < 2 or said[count] != said[count - 1])
            ):
                count += 1
        # A text's first token comes with its prompt, behind which no [PAD] stands.
        made += said[: count if made else 1]
    return made[:new]


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_texts_are_what_whole_sequences_with_pads_give(backend: str) -> None:
    fast = compiled(backend, pads(), VOUCHED)
    found = decoded(fast)
    assert found.stats.accepted_tokens == found.stats.draft_tokens > 20
    assert found.stats.steps < 18
    whole = compile(drafting_llama(pads(), VOUCHED), EAGER)
    for row, mask, text in zip(PROMPTS, MASK, found.sequences.tolist(), strict=True):
        # The last token that is asked for is never a draft's.
        assert text[5:-1] == units(whole, row[mask.bool()].tolist(), 20)[:-1]


def test_verified_or_never_sure_the_text_is_the_targets() -> None:
    plain = decoded(compiled("eager")).sequences
    verified = decoded(compiled("eager", pads()))
    assert torch.equal(verified.sequences, plain) and verified.stats.draft_tokens > 20
    never = decoded(compiled("eager", pads(1.0), VOUCHED))
    assert torch.equal(never.sequences, plain) and not never.stats.draft_tokens
    assert not torch.equal(decoded(compiled("eager", pads(), VOUCHED)).sequences, plain)


def test_what_a_call_rules_out_is_not_taken() -> None:
    """Bad words end a unit, and samples repeat with their seed, ids of [PAD] never among them."""
    fast = compiled("eager", pads(), VOUCHED)
    token = decoded(fast).sequences[2, 6].item()
    assert token not in decoded(fast, bad_words_ids=[[token]]).sequences[:, 5:]
    runs = [decoded(fast, do_sample=True, top_k=9, seed=3) for _ in range(2)]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert runs[0].sequences.max() < 32 and runs[0].stats.accepted_tokens


# -- training


def test_units_of_a_text_by_hand() -> None:
    """Tokens 2, 3 and 4, and 7 and 8, are units: `sure` tells of the token after each."""
    sure = torch.tensor([[0.2, 0.95, 0.95, 0.95, 0.3, 0.95, 0.91, 0.92]])
    found = within(sure, 0.9, 2)[0].int().tolist()
    assert found[:5] == [[0, 0], [1, 1], [1, 0], [0, 0], [0, 0]]
    assert found[5:] == [[1, 1], [1, 0], [0, 0]]


def test_places_are_where_units_begin() -> None:
    tokens = torch.arange(24).reshape(2, 12)
    inside = torch.zeros(2, 12, 3, dtype=torch.bool)
    inside[:, 4], inside[0, 7] = True, True
    places = unit_places(tokens, inside).tolist()
    assert {4, 7} <= set(places) and places == sorted(places) and max(places) < 9
    assert places == unit_places(tokens, inside).tolist()


@pytest.mark.parametrize("beyond", [0.0, 0.25])
def test_the_loss_by_hand(beyond: float) -> None:
    """-log p of the text's tokens at [PAD] tokens within units; others count `beyond`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (2, 10), generator=generator)
    teacher = torch.randn(2, 10, 7, generator=generator)
    for t in (1, 2, 3, 5, 6):  # of which the teacher is sure
        teacher[:, t] += 4 * torch.nn.functional.one_hot(tokens[:, t + 1], 7)
    record = LexicalDraft(prompts=2, decay=0.5, unit=0.3, beyond=beyond)
    fed: list[dict[str, torch.Tensor]] = []

    def ran(function: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        fed.append(inputs)
        count = inputs["select"].shape[1]
        return {"logits": torch.randn(2, count, 7, generator=generator)}

    batch = Batch(tokens, {}, teacher)
    state = generator.get_state()
    loss = lexical_loss(record, ran, batch)
    asked = fed[0]["tokens"][0, 10:].tolist()
    assert asked == [7] * len(asked)  # one id beyond the vocabulary
    places = fed[0]["positions"][0, 10::2] - 1
    generator.set_state(state)
    said = torch.randn(2, len(asked), 7, generator=generator).log_softmax(-1)
    text = torch.cat([tokens, teacher[:, -1:].argmax(-1)], 1)  # and what the teacher says behind it
    probs = teacher.softmax(-1)
    told = [[float(probs[n, t, text[n, t + 1]]) for t in range(10)] for n in range(2)]
    assert chances(batch).flatten().tolist() == pytest.approx([*told[0], *told[1]], abs=1e-6)
    total, weight = 0.0, 0.0
    for n in range(2):
        for group, s in enumerate(places.tolist()):
            for k in range(2):
                unit = all(told[n][at] > 0.3 for at in range(s, s + k + 2))
                counts = 1.0 if unit else beyond
                score = float(said[n, 2 * group + k, text[n, s + 2 + k]])
                total -= counts * 0.5**k * score
                weight += counts
    assert weight > 0 and float(loss.total) == pytest.approx(total / max(weight, 1.0), rel=1e-4)


@pytest.mark.long
def test_tuning_makes_units_on_the_bundled_model(tmp_path: Path) -> None:
    model = gw.optimize(DEMO, "lexical_unit", target="eager:cpu:float32")
    options = {"steps": 200, "batch": 4, "window": 96, "own": 0.5, "rate": 3e-3}
    made = train_target(model, None, out=tmp_path / "t", **options)
    assert made.change is not None and 0 < made.change.divergence < 0.5
    given = [f"{name}.weights={tmp_path / 't'}" for name in ("tune_target", "draft_lexical")]
    given.append("draft_lexical.sure=0.5")  # which is what so little training comes to
    recipe = gw.Recipe.load("lexical_unit").with_options(given)
    fast = gw.optimize(DEMO, recipe, target="eager:cpu:float32")
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:8]
    rows = [fast.tokenizer.encode(json.loads(line)["text"]).ids[:48] for line in lines]
    found = [fast.generate([r], **ASKED, return_dict_in_generate=True).stats for r in rows]
    tokens, steps = (sum(getattr(s, n) for s in found) for n in ("decoded_tokens", "steps"))
    assert tokens > 1.02 * steps


# -- what is refused


def test_who_guesses_is_not_believed() -> None:
    with pytest.raises(PassError, match=r"keeps all that is drafted, and draft=suffix.* guesses"):
        drafting_llama(named("draft_suffix"), VOUCHED)
    with pytest.raises(PassError, match=r"keeps all that is drafted"):
        drafting_llama(pads(), named("draft_suffix"), VOUCHED)
    with pytest.raises(PassError, match=r"the step drafts already"):
        drafting_llama(DraftPpd(), pads())


@pytest.mark.parametrize("wrong", ["sure=0", "sure=1.5", "unit=1.0", "beyond=2", "prompts=0"])
def test_options_out_of_bounds_are_refused(wrong: str) -> None:
    with pytest.raises(InputError, match=wrong.partition("=")[0]):
        gw.Recipe.load("lexical_unit").with_options([f"draft_lexical.{wrong}"]).steps  # noqa: B018
