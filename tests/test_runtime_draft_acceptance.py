"""SpecDec++: a head on a drafting model's states ends drafts where it expects a rejection."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, Weight
from graftwork.ir.plan import CachedDraft, DraftAcceptanceLength
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.length_draft_acceptance import LengthDraftAcceptance
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.speculate.lengths.draft_acceptance import DraftAcceptancePolicy
from graftwork.runtime.speculate.level import Level
from graftwork.training import fit
from graftwork.training.net import Net
from graftwork.training.objectives.base import Batch
from graftwork.training.objectives.draft_acceptance import (
    REJECTION,
    draft_acceptance_loss,
    drafts,
    rejection_loss,
)

PROMPTS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
LEVELS = 5


def drafting(drafter: str = "", guest: int = 1, **options: Any) -> Program:
    """A tiny model for which another one drafts as far as a head says. guest: the seed of that."""
    passes = [
        DraftModel(model="other", levels=LEVELS, drafter=drafter),
        LengthDraftAcceptance(**options),
        *(InsertKvCache(), PickLogits(), AddArgmax()),
    ]
    guests = {"other": tiny_llama(1, vocab=16, seed=guest)}
    program = tiny_llama(2, vocab=16).replace(guests=guests)
    return run_passes(program, [Step(p) for p in passes])[0]


def saying(program: Program, odds: float) -> Program:
    """The same with a head that always says so."""
    bias = Weight.of("acceptance.head.bias", torch.tensor([odds]))
    return program.replace(weights=program.weights.replacing(bias))


def decode(program: Program, target: str = "eager") -> Any:
    options = {"max_new_tokens": 24, "eos_token_id": [], "return_dict_in_generate": True}
    return generate(compile(program, Target.parse(target)), PROMPTS, **options)


@pytest.mark.parametrize("drafter", ["", "suffix(tokens=3, longest=8, shortest=1)"])
@pytest.mark.parametrize(
    ("odds", "length"),
    [
        (9.0, 5),
        # 1 - 0.5 is below 0.7, 1 - 0.25 above: nobody asks about the third before it is there.
        (0.0, 3),
        (-9.0, 2),  # the chance of the first is known with the second
    ],
)
def test_drafts_end_where_a_rejection_is_likely(odds: float, length: int, drafter: str) -> None:
    program = saying(drafting(drafter), odds)
    result = decode(program)
    plain = run_passes(tiny_llama(2, vocab=16), [Step(p) for p in (InsertKvCache(),)])[0]
    assert torch.equal(result.sequences, decode(plain).sequences)
    whole = result.stats.sequence_steps * length
    # The last ones of a text lack room.
    assert whole - 2 * sum(range(1, length + 1)) <= result.stats.draft_tokens <= whole


@pytest.mark.parametrize(
    "target", [pytest.param("torch:cpu:float32", marks=pytest.mark.long), "onnxruntime:cpu:float32"]
)
def test_backends_end_drafts_at_the_same_places(target: str) -> None:
    program = drafting()
    shape = program.weights["acceptance.head.weight"].type.shape
    head = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 2
    weight = Weight.of("acceptance.head.weight", head)
    program = program.replace(weights=program.weights.replacing(weight))
    ours, theirs = decode(program, target), decode(program)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.stats.draft_tokens == theirs.stats.draft_tokens
    # Neither always as far as may be, nor always as short.
    assert 2 < theirs.stats.draft_tokens / theirs.stats.sequence_steps < 4.7


def test_the_chance_that_any_is_rejected_by_hand() -> None:
    executable = compile(drafting(), Target.parse("eager"))
    policy = DraftAcceptancePolicy(DraftAcceptanceLength(threshold=0.7), executable, 2)

    def level(*chances: float) -> Level:
        odds = np.array([[np.log(p / (1 - p))] for p in chances], dtype=np.float32)
        nothing = np.zeros((2, 1, 1))
        return Level(nothing.astype(np.int64), nothing.astype(np.float32), None, odds)

    for _ in range(2):  # each draft begins anew
        assert policy.goes_on(level(0.1, 0.1), 1).all()  # of a token of the text
        assert policy.goes_on(level(0.8, 0.6), 2).tolist() == [True, True]
        assert policy.goes_on(level(0.8, 0.6), 3).tolist() == [True, True]  # 0.64, 0.36
        assert policy.goes_on(level(0.5, 0.6), 4).tolist() == [True, False]  # 0.32, 0.216


def test_the_loss_by_hand() -> None:
    odds, chance = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1.0, 0.25, 0.0])
    p = odds.sigmoid()
    wanted = -(chance * p.log() + 6 * (1 - chance) * (1 - p).log())
    torch.testing.assert_close(rejection_loss(odds, chance), wanted)
    assert REJECTION == 6
    # The best odds for a chance a weigh rejections six times: a / (a + 6 (1 - a)).
    odds = torch.zeros(1, requires_grad=True)
    best = torch.optim.SGD([odds], lr=0.3)
    for _ in range(400):
        best.zero_grad()
        rejection_loss(odds, torch.tensor([0.9])).sum().backward()
        best.step()
    assert float(odds.detach().sigmoid()) == pytest.approx(0.9 / (0.9 + 0.6), abs=1e-3)


def test_drafts_are_the_drafts_own_and_their_chances_the_targets() -> None:
    generator = torch.Generator().manual_seed(1)
    said, logits = (torch.randn(64, 40, 5, generator=generator) for _ in range(2))
    said, logits = said[:1].expand(64, -1, -1), logits[:1].expand(64, -1, -1)
    text = torch.zeros(64, 40, dtype=torch.int64)
    tokens, chance = drafts(said, Batch(text, {}, logits), torch.Generator().manual_seed(3))
    q, p = said[0].softmax(-1), logits[0].softmax(-1)
    for place in range(1, 40):
        ours, before = tokens[:, place], place - 1
        if before % 2:
            assert (ours == said[0, before].argmax()).all()
            assert chance[0, place] == (said[0, before].argmax() == logits[0, before].argmax())
        else:
            ratio = (p[before] / q[before]).clamp(max=1)
            torch.testing.assert_close(chance[:, place], ratio[ours])
    # Sampled from q: over all places, as often as q says within four standard errors.
    even = range(0, 39, 2)
    counts = sum((tokens[:, e + 1] == q[e].argmax()).sum() for e in even)
    expected = sum(float(q[e].max()) * 64 for e in even)
    spread = sum(float(q[e].max()) * (1 - float(q[e].max())) * 64 for e in even) ** 0.5
    assert abs(float(counts) - expected) < 4 * spread


def test_the_head_reads_states_of_tokens_that_the_draft_said() -> None:
    """In training the text is fed with some of the draft's tokens, and they alone count."""
    fed = []

    def run(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        assert function == "draft"
        fed.append(inputs["tokens"])
        said = torch.full((4, 300, 9), -20.0)
        said[..., 7] = 20.0  # always the same, which is never the text's
        return {"draft_logits": said, "draft_odds": odds}

    text = torch.randint(0, 6, (4, 300), generator=torch.Generator().manual_seed(0))
    odds = torch.zeros(4, 300, requires_grad=True)
    draft = CachedDraft("draft", levels=4)
    batch = Batch(text, {}, torch.zeros(4, 300, 9), draft)
    loss = draft_acceptance_loss(DraftAcceptanceLength(), run, batch)
    assert torch.equal(fed[0], text)
    mixed = fed[1] != text
    assert (fed[1][mixed] == 7).all() and 0.1 < float(mixed.float().mean()) < 0.2
    loss.total.backward()
    assert odds.grad is not None and torch.equal(odds.grad != 0, mixed)


def test_it_learns_and_the_draft_stays_as_it_is(tmp_path: Path) -> None:
    text = [[(i * i + j) % 16 for i in range(90)] for j in range(12)]
    program = drafting()
    model = Model(program, Target("eager", "cpu"), {"name": "test"})
    options = {"steps": 240, "batch": 12, "window": 48, "own": 0.0, "rate": 3e-3}
    seen: list[float] = []
    fitted = fit(model, text, out=tmp_path, progress=lambda s: seen.append(s.loss), **options)
    assert len(fitted.hits) == 1  # the head's alone
    # Better than a head could do that says the same of every token.
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.tensor(text)[:, :48]
    batch = Batch(tokens, {}, net.run(None, tokens=tokens)["logits"], program.plan.draft)
    said = net.run("draft", tokens=tokens)["draft_logits"]
    mean = drafts(said, batch, torch.Generator().manual_seed(0))[1][:, 1:].mean()
    constant = (mean / (mean + REJECTION * (1 - mean))).logit()
    losses = [loss for loss in seen if not math.isnan(loss)]
    assert np.mean(losses[-60:]) < 0.97 * float(rejection_loss(constant, mean))
    for name, weight in program.weights.items():
        same = torch.equal(weight.load(), fitted.model.program.weights[name].load())
        assert same != name.startswith("acceptance.")
    loaded = drafting(weights=str(tmp_path))
    name = "acceptance.head.weight"
    assert torch.equal(loaded.weights[name].load(), fitted.model.program.weights[name].load())
    assert loaded.plan.length.trained and not program.plan.length.trained


def test_refusals() -> None:
    with pytest.raises(PassError, match=r"expected one model that drafts.*got draft=heads"):
        run_passes(tiny_llama(), [Step(DraftMedusa()), Step(LengthDraftAcceptance())])
