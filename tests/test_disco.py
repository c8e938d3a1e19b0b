"""DISCO: a classifier of a draft model's predictions ends drafts where it expects a rejection."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime_models import TableExecutable, program
from test_runtime_lengths import level
from test_runtime_sampling import assert_distributed, texts_drawn
from test_runtime_verifiers import DRAFT, LENGTH, PROMPT, RULE, VOCAB, exact
from tiny import tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import Function, PassError, Program, TensorType, UnsupportedError, Weight, run
from graftwork.ir.plan import CachedDraft, Chain, HeadsDraft
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.disco import PLACES, DiscoLength, DiscoPolicy
from graftwork.passes.drafting.disco.graph import LengthDisco
from graftwork.passes.drafting.disco.objective import disco_loss, features_of, places_in_drafts
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.training import fit
from graftwork.training.objectives.base import Batch

PROMPTS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
LEVELS = 5


def drafting(guest: int = 1, **options: Any) -> Program:
    """A tiny model for which another one drafts as far as the classifier says."""
    passes = [
        DraftModel(model="other", levels=LEVELS),
        LengthDisco(**options),
        *(InsertKvCache(), PickLogits(), AddArgmax()),
    ]
    guests = {"other": tiny_llama(1, vocab=16, seed=guest)}
    program = tiny_llama(2, vocab=16).replace(guests=guests)
    return run_passes(program, [Step(p) for p in passes])[0]


def saying(program: Program, by_place: float, always: float) -> Program:
    """The same with a classifier whose log odds are always + by_place * (place in the draft)."""
    weights = program.weights
    first = torch.zeros(weights["disco.0.weight"].type.shape)
    first[0, 2] = PLACES * 100  # SiLU of a large number is the number
    last = torch.zeros(weights["disco.head.weight"].type.shape)
    last[0, 0] = by_place / 100
    new = {"disco.0.weight": first, "disco.head.weight": last}
    new["disco.head.bias"] = torch.tensor([always])
    return program.replace(weights=weights.replacing(*(Weight.of(n, t) for n, t in new.items())))


def decode(program: Program, target: str = "eager") -> Any:
    options = {"max_new_tokens": 24, "eos_token_id": [], "return_dict_in_generate": True}
    return generate(compile(program, Target.parse(target)), PROMPTS, **options)


@pytest.mark.parametrize(
    ("by_place", "always", "length"),
    [(0.0, 9.0, 5), (0.0, -9.0, 1), (-2.0, 5.0, 3), (-2.0, 7.1, 4), (0.0, 0.0, 5)],
)
@pytest.mark.parametrize(
    "target", ["eager", pytest.param("onnxruntime:cpu:float32", marks=pytest.mark.long)]
)
def test_drafts_end_where_a_rejection_is_likely(
    by_place: float, always: float, length: int, target: str
) -> None:
    """The token that fails is still drafted: of it the question is whether to go on."""
    result = decode(saying(drafting(), by_place, always), target)
    plain = run_passes(tiny_llama(2, vocab=16), [Step(InsertKvCache())])[0]
    assert torch.equal(result.sequences, decode(plain).sequences)
    whole = result.stats.sequence_steps * length
    # The last ones of a text lack room.
    assert whole - 2 * sum(range(1, length + 1)) <= result.stats.draft_tokens <= whole


def test_a_good_draft_is_kept() -> None:
    result = decode(saying(drafting(guest=1), 0.0, 9.0))
    same = run_passes(
        tiny_llama(2, vocab=16).replace(guests={"other": tiny_llama(2, vocab=16)}),
        [Step(p) for p in (DraftModel(model="other"), LengthDisco(), InsertKvCache())],
    )[0]
    assert decode(same).stats.accepted_per_step > 4 > result.stats.accepted_per_step


def test_what_the_classifier_is_asked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    executable = compile(drafting(), Target.parse("eager"))
    policy = DiscoPolicy(DiscoLength(threshold=0.6), executable, 3)
    logits = np.log(np.array([[[0.5, 0.25, 0.25]], [[0.9, 0.05, 0.05]], [[0.9, 0.05, 0.05]]]))
    here = level([0.5, 0.25], [0.9, 0.05], [None, None], logits=logits.astype(np.float32))
    asked = []

    def answer(function: str, inputs: Any, fetch: Any) -> dict[str, torch.Tensor]:
        assert function == "disco" and fetch == ("odds",)
        asked.append(inputs["features"].clone())
        return {"odds": torch.tensor([[0.4], [0.41], [9.0]])}

    monkeypatch.setattr(executable, "run", answer)
    # sigmoid(0.4) < 0.6 < sigmoid(0.41); where there is no token, nothing goes on.
    assert policy.goes_on(here, 2).tolist() == [False, True, False]
    (features,) = asked
    assert features.shape == (3, 1, 3)
    sure = -(0.9 * math.log(0.9) + 0.1 * math.log(0.05))
    torn = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25))
    assert features[0, 0].tolist() == pytest.approx([0.5, torn, 2 / PLACES], abs=1e-5)
    assert features[1, 0].tolist() == pytest.approx([0.9, sure, 2 / PLACES], abs=1e-5)


def test_the_classifier_is_a_perceptron() -> None:
    program = drafting(inner=7)
    shapes = {n: tuple(program.weights[n].type.shape) for n in program.weights if "disco" in n}
    assert shapes == {
        "disco.0.weight": (7, 3),
        "disco.0.bias": (7,),
        "disco.head.weight": (1, 7),
        "disco.head.bias": (1,),
    }
    features = torch.randn(2, 3, 3)
    given = {n: program.weights[n].load() for n in shapes}
    given["disco.head.weight"] = torch.randn(1, 7)
    new = Weight.of("disco.head.weight", given["disco.head.weight"])
    program = program.replace(weights=program.weights.replacing(new))
    inner = torch.nn.functional.silu(features @ given["disco.0.weight"].T)
    wanted = (inner @ given["disco.head.weight"].T)[..., 0]
    torch.testing.assert_close(run(program, "disco", {"features": features})["odds"], wanted)


def test_features_of_logits_by_hand() -> None:
    logits = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]]).log()
    found = features_of(logits, torch.tensor([[3, 8]]))
    torn = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25))
    torch.testing.assert_close(found, torch.tensor([[[0.5, torn, 3 / 8], [1.0, 0.0, 1.0]]]))


def test_the_loss_asks_about_drafted_tokens_alone() -> None:
    said = torch.full((1, 6, 4), -5.0)
    said[..., 2] = 5.0
    teacher = torch.zeros(1, 6, 4)
    teacher[0, [0, 2, 3, 4, 5], 2] = 1.0  # the draft is wrong at place 1
    teacher[0, 1, 3] = 1.0
    odds = torch.zeros(1, 6, requires_grad=True)
    seen = []

    def run(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if function == "draft":
            return {"draft_logits": said}
        seen.append(inputs["features"])
        return {"odds": odds}

    batch = Batch(torch.zeros(1, 6, dtype=torch.int64), {}, teacher, CachedDraft("draft", levels=2))
    loss = disco_loss(DiscoLength(), run, batch)
    # Places 1, 2, 1, 2, 0, 1: behind a whole draft the target adds a token.
    assert (seen[0][0, :, 2] * PLACES).tolist() == [1, 2, 1, 2, 0, 1]
    loss.total.backward()
    assert odds.grad is not None
    wanted = torch.tensor([-0.1, 0.1, -0.1, -0.1, 0.0, -0.1])  # (1/2 - accepted) / 5
    torch.testing.assert_close(odds.grad[0], wanted)
    assert float(loss.total.detach()) == pytest.approx(math.log(2))
    with pytest.raises(UnsupportedError, match=r"draft=heads.* has none"):
        other = Batch(batch.tokens, {}, teacher, HeadsDraft())
        disco_loss(DiscoLength(), run, other)


def test_places_begin_anew_after_a_rejection() -> None:
    accepted = torch.tensor([[False, False, True, True], [True, True, True, True]])
    assert places_in_drafts(accepted, 3).tolist() == [[1, 1, 1, 2], [1, 2, 3, 0]]


def test_it_learns_and_the_draft_stays_as_it_is(tmp_path: Path) -> None:
    text = [[(i * i + j) % 16 for i in range(90)] for j in range(12)]
    program = drafting()
    model = Model(program, Target("eager", "cpu"), {"name": "test"})
    options = {"steps": 150, "batch": 6, "window": 48, "own": 0.0, "rate": 2e-2}
    seen: list[float] = []
    fitted = fit(model, text, out=tmp_path, progress=lambda s: seen.append(s.loss), **options)
    losses = [loss for loss in seen if not math.isnan(loss)]
    assert np.mean(losses[:5]) == pytest.approx(math.log(2), abs=0.1)
    assert np.mean(losses[-30:]) < 0.9 * np.mean(losses[:5])
    for name, weight in program.weights.items():
        same = torch.equal(weight.load(), fitted.model.program.weights[name].load())
        assert same != name.startswith("disco.")
    loaded = drafting(weights=str(tmp_path))
    assert loaded.plan.length.trained and not program.plan.length.trained
    name = "disco.head.weight"
    assert torch.equal(loaded.weights[name].load(), fitted.model.program.weights[name].load())


def test_refusals() -> None:
    with pytest.raises(PassError, match="requires 'drafts'"):
        run_passes(tiny_llama(), [Step(LengthDisco())])
    for threshold in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="threshold"):
            LengthDisco(threshold=threshold)


class Judged(TableExecutable):
    """A table whose classifier goes on where the draft's best token is likelier than a half."""

    def run(self, function: str, inputs: Any, fetch: Any) -> dict[str, torch.Tensor]:
        if function != "disco":
            return super().run(function, inputs, fetch)
        return {"odds": inputs["features"][..., 0] - 0.5}


@pytest.mark.parametrize("size", [(1, 120), (4, 50)], ids=str)
def test_samples_follow_the_models_distribution(size: tuple[int, int]) -> None:
    held = program(VOCAB, draft=DRAFT, tree=Chain(depth=3))
    classifier = Function("disco")
    features = classifier.add_input("features", TensorType.parse("f32[B,T,3]"))
    classifier.set_outputs({"odds": features})
    held = held.with_function(classifier)
    held = held.replace(plan=replace(held.plan, length=DiscoLength()))
    found, accepted, drafted = texts_drawn(Judged(RULE, held), PROMPT, LENGTH, size, {})
    assert_distributed(found, exact({}))
    assert 0.05 < accepted / drafted < 0.95
