"""AdaEAGLE: a predictor on the target's state says how long the next draft should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, UnsupportedError, Weight, run
from graftwork.ir.plan import HeadsDraft
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.adaeagle import PredictedLength, PredictedPolicy
from graftwork.passes.drafting.adaeagle.graph import LengthPredicted
from graftwork.passes.drafting.adaeagle.objective import accepted_lengths, length_loss
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.engine.base import Pass
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.feeding.draft import Draft, VerifiedStep
from graftwork.training import fit
from graftwork.training.net import Net
from graftwork.training.objectives.acceptance import agreements
from graftwork.training.objectives.base import Batch

PROMPTS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


def predicted(draft: Pass | None = None, said: float | None = None, **options: Any) -> Program:
    """A tiny model whose drafts have predicted lengths; said: always so many tokens."""
    passes = (draft or DraftEagle(levels=4), LengthPredicted(levels=4, **options))
    passes += (InsertKvCache(), PickLogits(), AddArgmax())
    program = run_passes(tiny_llama(vocab=16), [Step(p) for p in passes])[0]
    if said is None:
        return program
    bias = Weight.of("length.head.bias", torch.tensor([said - 2.0]))
    return program.replace(weights=program.weights.replacing(bias))


def decode(program: Program, target: str = "eager") -> Any:
    options = {"max_new_tokens": 24, "eos_token_id": [], "return_dict_in_generate": True}
    return generate(compile(program, Target.parse(target)), PROMPTS, **options)


@pytest.mark.parametrize(("said", "length"), [(9.0, 4), (2.6, 3), (2.4, 2), (-3.0, 1)])
@pytest.mark.parametrize(
    "target", ["eager", pytest.param("onnxruntime:cpu:float32", marks=pytest.mark.long)]
)
def test_drafts_are_as_long_as_predicted(said: float, length: int, target: str) -> None:
    result = decode(predicted(said=said), target)
    plain = run_passes(tiny_llama(vocab=16), [Step(InsertKvCache())])[0]
    assert torch.equal(result.sequences, decode(plain).sequences)
    # The first draft, before any state is known, has all levels; the last ones lack room.
    whole = result.stats.sequence_steps * length + 2 * (4 - length)
    assert whole - 2 * (1 + 2 + 3 + 4) <= result.stats.draft_tokens <= whole


def test_copied_drafts_have_predicted_lengths_too() -> None:
    result = decode(predicted(named("draft_suffix", tokens=4, shortest=1), said=1.0))
    assert 0 < result.stats.draft_tokens <= result.stats.sequence_steps + 2 * 3


def test_the_step_returns_embeddings_beside_states() -> None:
    passes = [DraftEagle(levels=4), LengthPredicted(levels=4)]
    program = run_passes(tiny_llama(vocab=16), [Step(p) for p in passes])[0]
    tokens = torch.tensor([[3, 4, 5]])
    made = run(program, "step", {"tokens": tokens, "positions": torch.arange(3)[None]})
    embedded = program.weights["embed"].load()[tokens]
    wanted = torch.cat([embedded, made["hidden.normed"]], -1)
    assert torch.equal(made["hidden.embedded"], wanted)
    alone = run_passes(tiny_llama(vocab=16), [Step(named("draft_suffix")), Step(passes[1])])[0]
    assert "hidden.normed" not in alone.step.outputs and "hidden.embedded" in alone.step.outputs


def test_the_predictor_is_a_perceptron_of_three_layers() -> None:
    program = predicted(inner=5)
    w = {n: program.weights[n].load() for n in program.weights if n.startswith("length.")}
    assert [tuple(w[f"length.{n}.weight"].shape) for n in ("0", "1", "head")] == [
        (5, 64),
        (5, 5),
        (1, 5),
    ]
    head = torch.randn(1, 5)
    program = program.replace(
        weights=program.weights.replacing(Weight.of("length.head.weight", head))
    )
    x = hidden = torch.randn(2, 3, 64)
    for layer in (0, 1):
        x = torch.nn.functional.silu(x @ w[f"length.{layer}.weight"].T)
    wanted = (x @ head.T)[..., 0] + 2  # untrained it says half of the levels
    torch.testing.assert_close(run(program, "length", {"hidden": hidden})["length"], wanted)


def test_the_state_that_chose_the_last_token_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    executable = compile(predicted(), Target.parse("eager"))
    policy = PredictedPolicy(PredictedLength(levels=4), executable, 2)
    assert policy.wants == ("hidden.embedded",) and policy.limits([9, 9]) == [4, 4]
    states = torch.arange(2 * 4 * 2).reshape(2, 4, 2).float()

    def answer(function: str, inputs: Any, fetch: Any) -> dict[str, torch.Tensor]:
        assert function == "length" and fetch == ("length",)
        # The first text accepted two of its tokens, the second none: columns 2 and 0.
        assert torch.equal(inputs["hidden"][:, 0], states[[0, 1], [2, 0]])
        return {"length": torch.tensor([[1.51], [0.2]])}

    monkeypatch.setattr(executable, "run", answer)
    drafts = [Draft([1, 2, 3]), Draft([1, 2, 3])]
    outputs = {"hidden.embedded": states}
    taken = VerifiedStep(drafts, [[0, 1], []], [[1, 2, 9], [8]], [0, 0], outputs)
    policy.observe(taken, 0, 0)
    assert policy.limits([9, 9]) == [2, 1] and policy.limits([0, 9]) == [0, 1]


def test_what_a_layer_on_features_gets_right() -> None:
    """Level by level as it drafts: from the target's features, then from its own states."""
    passes = [DraftEagle(levels=3), InsertKvCache()]
    program = run_passes(tiny_llama(vocab=16), [Step(p) for p in passes])[0]
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(1))
    made = net.run(None, tokens=tokens)
    states = {"hidden.normed": made["hidden.normed"]}
    batch = Batch(tokens, states, made["logits"], program.plan.draft)
    agreed = agreements(program.plan.draft, net.run, batch, 4)
    assert [level.shape[1] for level in agreed] == [8, 7, 6]
    best = made["logits"].argmax(-1)
    for start in range(5):
        fed, given = tokens[:, 1 : start + 2], states["hidden.normed"][:, : start + 1]
        for level in range(3):
            out = net.run("eagle", tokens=fed, hidden=given)
            said = out["draft_logits"][:, -1].argmax(-1)
            right = said == best[:, start + 1 + level]
            assert torch.equal(agreed[level][:, start], right)
            fed = tokens[:, 1 : start + 3 + level]
            given = torch.cat([given, out["hidden"][:, -1:]], 1)


def test_the_loss_by_hand() -> None:
    right, wrong = torch.tensor([[True, True, True]]), torch.tensor([[True, False]])
    wanted = accepted_lengths([right, wrong])
    assert wanted.tolist() == [[2.0, 1.0]]
    heads = torch.tensor([[[[0.0, 9.0]], [[9.0, 0.0]], [[0.0, 9.0]]]])  # of one head
    said = torch.tensor([[1.0, 0.25, 7.0]], requires_grad=True)

    def run(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"draft_logits": heads} if function == "heads" else {"length": said}

    teacher = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]])
    states = {"hidden": torch.zeros(1, 3, 4), "hidden.embedded": torch.zeros(1, 3, 8)}
    batch = Batch(torch.ones(1, 3, dtype=torch.int64), states, teacher, HeadsDraft(levels=1))
    loss = length_loss(PredictedLength(), run, batch)
    # The head is right behind the first token and wrong behind the second: 1, 0.
    assert float(loss.total.detach()) == pytest.approx((0 + 0.25**2 / 2) / 2)
    assert loss.hits == [1.0]


def test_it_learns_where_the_drafter_is_right(tmp_path: Path) -> None:
    """Better than a predictor could do that says the same of every token."""
    text = [[(i * i + j) % 16 for i in range(90)] for j in range(12)]
    model = Model(predicted(DraftMedusa(heads=3)), Target("eager", "cpu"), {"name": "test"})
    options = {"steps": 240, "batch": 4, "window": 32, "own": 0.5, "rate": 3e-2}
    fitted = fit(model, text, out=tmp_path, **options)
    program = fitted.model.program
    net = Net(program, [], torch.device("cpu"))
    tokens = torch.tensor(text)[:, :48]
    made = net.run(None, tokens=tokens)
    states = {n: v for n, v in made.items() if n.startswith("hidden")}
    batch = Batch(tokens, states, made["logits"], program.plan.draft)
    wanted = accepted_lengths(agreements(batch.draft, net.run, batch, 4))
    loss = float(length_loss(program.plan.length, net.run, batch).total.detach())
    constant = float(torch.nn.functional.smooth_l1_loss(wanted.median().expand_as(wanted), wanted))
    assert loss < 0.95 * constant
    assert program.plan.length.trained
    loaded = predicted(DraftMedusa(heads=3), weights=str(tmp_path))
    name = "length.head.weight"
    assert torch.equal(loaded.weights[name].load(), program.weights[name].load())
    assert loaded.plan.length.trained and bool(loaded.weights[name].load().any())


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="requires 'drafts'"):
        run_passes(tiny_llama(), [Step(LengthPredicted())])
    model = Model(predicted(DraftHydra(heads=2)), Target("eager", "cpu"), {"name": "test"})
    with pytest.raises(UnsupportedError, match="not for draft=recurrent"):
        fit(model, [[1, 2, 3] * 30] * 4, out=tmp_path, steps=1, batch=1, window=16, own=0.0)
