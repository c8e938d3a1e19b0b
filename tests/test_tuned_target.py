"""A target that is trained with its drafters: asked for, measured, lossless of the tuned target."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from selection import mostly_long
from test_front_door import ROOT
from test_runtime_cached import CHAIN
from test_training import FEW, TEXT
from tiny import named, tiny_llama
from whole_drafters import EAGER, Case

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.cli.commands import app
from graftwork.ir import GraftworkError, InputError, PassError, Program, Weight, run
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.noise.graph import DraftNoise
from graftwork.passes.drafting.ppd.graph import DraftPpd
from graftwork.passes.drafting.streams.graph import DraftStreams
from graftwork.passes.drafting.target_change import Changed
from graftwork.passes.drafting.trained import adapters_of
from graftwork.passes.drafting.tune_target import TuneTarget, adapted, untuned
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.training import FitState, Tuned, fit, train_target
from graftwork.training.fit import FitOptions
from graftwork.training.tuned import TunedNet, Tuning

DEMO = ROOT / "graftwork" / "demo_model"
BEST = named("tree_best_first", nodes=9, depth=3, width=3)
CASES = {
    "medusa2": Case((DraftMedusa(heads=3, candidates=4),), BEST, "medusa2"),
    "make_some_noise": Case((DraftNoise(prompts=3, candidates=4),), BEST, "make_some_noise"),
    "speculative_streaming": Case(
        (DraftStreams(prompts=3, last=2, rank=4, candidates=4),), BEST, "speculative_streaming"
    ),
    "space": Case((DraftPpd(prompts=3, candidates=4),), BEST, "space"),
}
TUNE = TuneTarget(rank=4)
EIGHT = [
    [7, 3],
    [4, 9, 9, 1],
    [5, 6, 7, 8, 9],
    [30],
    [1, 2, 1, 2, 1],
    [8] * 6,
    [3, 1, 4, 1],
    [2, 7],
]


def moved(program: Program, seed: int = 0, size: float = 0.1) -> Program:
    """The program with adapters that change its target."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        Weight.of(name, torch.randn(weight.type.shape, generator=generator) * size)
        for name, weight in adapters_of(program).items()
        if name.endswith(".up")
    ]
    return program.replace(weights=program.weights.renewed(*drawn))


def tuned_llama(seed: int = 4) -> Program:
    return moved(TUNE.run(tiny_llama(seed)).program)


def drafted(case: Case, **how: Any) -> Model:
    """A model that drafts chains, and whose target can be trained."""
    alone = replace(case, passes=(TuneTarget(rank=4, **how), *case.passes))
    return alone.model()


def batch_of(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged texts, padded on the left, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


# -- the pass


def test_an_adapter_by_hand() -> None:
    """W + 2 up down."""
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]])
    down, up = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5], [0.0], [2.0]])
    wanted = torch.tensor([[2.0, 1.0], [3.0, 4.0], [4.0, -3.0]])
    assert torch.equal(adapted(weight, down, up, scale=2), wanted)
    assert adapted(weight.bfloat16(), down, up, scale=2).dtype == torch.bfloat16


def test_untrained_adapters_change_nothing_and_reach_all_layers() -> None:
    before, program = tiny_llama(4), TUNE.run(tiny_llama(4)).program
    assert len(adapters_of(program)) == 2 * 7 * 4  # seven products in each of four layers
    for name, weight in before.weights.items():
        assert torch.equal(program.weights[name].load(), weight.load())
    changed = moved(program)
    other = {
        n
        for n in before.weights
        if not torch.equal(changed.weights[n].load(), before.weights[n].load())
    }
    assert other == {n for n in before.weights if n.count(".") == 2 and "norm" not in n}
    again = untuned(changed)
    assert all(
        torch.equal(again.weights[n].load(), before.weights[n].load()) for n in before.weights
    )


def test_the_contract_and_the_report_say_that_the_target_changes() -> None:
    for name in CASES:
        assert gw.Recipe.load(name).contract == "tuned"
    model = gw.optimize(DEMO, "medusa2", target="eager:cpu:float32")
    assert model.report is not None and model.report.contract == "tuned"
    text = str(model.report)
    assert "texts are the tuned target's own" in text and "change nothing: tune" in text


def test_weights_of_few_bits_are_refused() -> None:
    few, _ = run_passes(tiny_llama(4), [Step(QuantizeWeights(bits=8, group=32))])
    with pytest.raises(PassError, match=r"weights in few bits .*tune the checkpoint"):
        TUNE.run(few)


# -- text


@pytest.mark.parametrize("backend", ["eager", pytest.param("onnxruntime", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_text_is_the_tuned_targets_own(name: str, backend: str) -> None:
    """Eight prompts, alone and in a ragged batch, next to the tuned target without a drafter; the
    original writes something else."""
    where = Target(backend, "cpu")
    fast = compile(CASES[name].program(start=tuned_llama()), where)
    steps = [Step(each) for each in (InsertKvCache(), PickLogits(), AddArgmax())]
    plain, original = (
        compile(run_passes(start, steps)[0], where) for start in (tuned_llama(), tiny_llama(4))
    )
    ids, mask = batch_of(EIGHT)
    asked = {"max_new_tokens": 20, "eos_token_id": []}
    wanted = gw.model.generate(plain, ids, attention_mask=mask, **asked)
    found = gw.model.generate(fast, ids, attention_mask=mask, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, wanted)
    assert found.stats.draft_tokens > found.stats.sequence_steps
    for row, whole in zip(EIGHT, wanted, strict=True):
        alone = gw.model.generate(fast, torch.tensor([row]), **asked)[0]
        assert torch.equal(alone[len(row) :], whole[ids.shape[1] :])
    others = gw.model.generate(original, ids, attention_mask=mask, **asked)
    assert not torch.equal(others, wanted)


# -- training


def batch_loss(how: dict[str, Any], tmp_path: Path) -> tuple[Tuning, TunedNet, Any, Any]:
    """A run over one batch, whose adapters have moved already."""
    model = drafted(CASES["medusa2"], **how)
    model = replace(model, program=moved(model.program))
    options = FitOptions(steps=1, batch=2, window=12, own=0.0)
    tuning = Tuning(model, TEXT, tmp_path, options, lambda state: None, None, None, None)
    names = [n for n in model.program.weights if n.startswith("medusa")]
    net = tuning._net(
        [n for n in names if model.program.weights[n].type.dtype.is_floating_point],
        torch.device("cpu"),
    )
    assert isinstance(net, TunedNet)
    from graftwork.training.teacher_cache import CachedWindows, Teacher

    teacher = Teacher(tuning._teaching(net))
    tokens = torch.tensor([row[:12] for row in TEXT[:2]])
    windows = CachedWindows(tokens, torch.zeros(2, dtype=torch.int64), teacher.states(tokens))
    return tuning, net, teacher, windows


@pytest.mark.parametrize("toward", ["target", "text", "nothing"])
def test_the_joint_loss_by_its_parts(toward: str, tmp_path: Path) -> None:
    """KL(original || tuned) or the text's cross entropy, computed of both programs as they run, and
    the weighed cross entropies of the heads: 0.8^k of the k-th."""
    tuning, net, teacher, windows = batch_loss({"toward": toward, "drafts": 0.3}, tmp_path)
    found = tuning._loss(net, teacher, windows).total
    tokens, program = windows.tokens, tuning.model.program
    heads = [w for w in program.weights if w.startswith("medusa.") and w.endswith("linear.weight")]
    assert len(heads) == 3
    steps = torch.arange(12).expand(2, -1)

    def said(which: Program) -> torch.Tensor:
        start = tiny_llama(4)
        for name in start.weights:
            start = start.replace(
                weights=start.weights.replacing(Weight.of(name, which.weights[name].load()))
            )
        return run(start, "step", {"tokens": tokens, "positions": steps})["logits"].log_softmax(-1)

    tuned, original = said(moved(TUNE.run(tiny_llama(4)).program)), said(tiny_llama(4))
    anchor = {
        "target": (original.exp() * (original - tuned)).sum(-1).mean(),
        "text": -tuned[:, :-1].gather(-1, tokens[:, 1:, None]).mean(),
        "nothing": torch.zeros(()),
    }[toward]
    hidden = net.run(None, tokens=tokens)["hidden"]
    logits = net.run(program.plan.draft.function, hidden=hidden)["draft_logits"].log_softmax(-1)
    drafts = torch.zeros(())
    for k in range(3):
        behind = logits[:, : 10 - k, k].gather(-1, tokens[:, 2 + k :, None])
        last = tuned[:, -1].argmax(-1)  # behind the text's end, what the target says
        end = logits[:, 10 - k, k].gather(-1, last[:, None])
        drafts = drafts - 0.8**k * (behind.sum() + end.sum()) / (2 * (11 - k))
    wanted = anchor + (1.0 if toward == "nothing" else 0.3) * drafts
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_adapters_get_the_gradient_of_the_whole_loss(tmp_path: Path) -> None:
    """By a difference of the loss, whatever passes have made of the weights since."""
    tuning, net, teacher, windows = batch_loss({}, tmp_path)
    tuning._loss(net, teacher, windows).total.backward()
    net.collect()
    for part in ("down", "up"):
        adapter = net.tensors[f"tuned.layers.1.q.{part}"]
        at = int(adapter.grad.abs().argmax())
        slope, losses = float(adapter.grad.flatten()[at]), []
        for step in (1e-3, -1e-3):
            with torch.no_grad():
                adapter.flatten()[at] += step
                net.renew()
                losses.append(float(tuning._loss(net, teacher, windows).total))
                # with gradients off the loss is the drafts' alone
                adapter.flatten()[at] -= step
        assert losses[0] != losses[1]
        with torch.enable_grad():
            values = []
            for step in (1e-3, -1e-3):
                with torch.no_grad():
                    adapter.flatten()[at] += step
                net.renew()
                values.append(float(tuning._loss(net, teacher, windows).total.detach()))
                with torch.no_grad():
                    adapter.flatten()[at] -= step
        assert math.isclose((values[0] - values[1]) / 2e-3, slope, rel_tol=0.05)


def losses_of(model: Model, out: Path, **options: Any) -> tuple[Tuned, np.ndarray]:
    seen: list[tuple[float, ...]] = []

    def note(state: FitState) -> None:
        seen.extend([(state.loss, *state.hits)] if state.hits else [])

    return train_target(model, TEXT, out=out, progress=note, **options), np.array(seen)


@pytest.mark.parametrize("name", mostly_long(CASES, keep=("make_some_noise",)))
def test_the_loss_falls_and_training_says_what_changed(name: str, tmp_path: Path) -> None:
    toward = {"medusa2": "target", "make_some_noise": "nothing"}.get(name, "text")
    own = float(toward == "target")  # heads of a random model can learn its own text alone
    how = {"batch": 4, "window": 32, "own": own, "rate": 2e-2, "seed": 1, "passes": 8}
    model = drafted(CASES[name], toward=toward, warm=0.0, slower=1.0)
    made, seen = losses_of(model, tmp_path, steps=80, **how)
    assert seen[-10:, 0].mean() < 0.93 * seen[:10, 0].mean()
    assert made.change is not None and made.change.divergence > 0 and made.change.agreement < 1
    stored = json.loads((tmp_path / "tuned.json").read_text())
    assert Changed.model_validate(stored) == made.change


def test_heads_learn_alone_at_first(tmp_path: Path) -> None:
    made, _ = losses_of(drafted(CASES["medusa2"], warm=0.99), tmp_path, **{**FEW, "steps": 2})
    held = load_file(tmp_path / "heads.safetensors")
    assert not any(t.any() for n, t in held.items() if n.endswith(".up") and n.startswith("tuned."))
    assert made.change is not None and made.change.divergence == pytest.approx(0, abs=1e-6)
    assert made.change.agreement == 1


def test_resumed_tuning_ends_where_uninterrupted_tuning_does(tmp_path: Path) -> None:
    model = drafted(CASES["medusa2"], warm=0.3)
    options = {**FEW, "steps": 5, "save_every": 2, "seed": 2}

    def stop(state: FitState) -> None:
        if state.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_target(model, TEXT, out=tmp_path / "a", progress=stop, **options)
    train_target(model, TEXT, out=tmp_path / "a", resume=True, **options)
    train_target(model, TEXT, out=tmp_path / "b", **options)
    first, second = (load_file(tmp_path / n / "heads.safetensors") for n in "ab")
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    assert any(t.any() for n, t in first.items() if n.startswith("tuned.") and n.endswith(".up"))


# -- what is refused


def test_tuning_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"changes the target's weights: ask for that"):
        fit(drafted(CASES["medusa2"]), TEXT, out=tmp_path, **FEW)
    with pytest.raises(InputError, match=r"expected a recipe with the pass tune_target"):
        train_target(CASES["medusa2"].model(), TEXT, out=tmp_path, **FEW)


def test_bad_input_is_refused_before_training(tmp_path: Path) -> None:
    model = drafted(CASES["medusa2"])
    with pytest.raises(InputError, match=r"expected at least a window of 128"):
        train_target(model, [[1, 2, 3] * 20], out=tmp_path, steps=1, window=128)
    half = replace(model, target=Target("eager", "cpu", torch.bfloat16))
    with pytest.raises(InputError, match=r"expected a target of float32"):
        train_target(half, TEXT, out=tmp_path, **FEW)
    few = replace(CASES["medusa2"], passes=(TUNE, *CASES["medusa2"].passes))
    program = few.program(QuantizeWeights(bits=8, group=32), tree=CHAIN)
    with pytest.raises(InputError, match=r"in few bits, which cannot take small steps"):
        train_target(Model(program, EAGER, {"name": "test"}), TEXT, out=tmp_path, **FEW)
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters and heads of the tiny model."""
    folder = tmp_path_factory.mktemp("tuned")
    made, _ = losses_of(
        drafted(CASES["medusa2"], warm=0.0), folder, **{**FEW, "steps": 6, "rate": 2e-2}
    )
    assert made.change is not None
    return folder


def passes_with(tune: str | None, heads: str) -> Case:
    first = () if tune is None else (TuneTarget(weights=tune),)
    return replace(
        CASES["medusa2"], passes=(*first, DraftMedusa(heads=3, candidates=4, weights=heads))
    )


def test_what_was_trained_is_loaded_and_told(trained: Path) -> None:
    folder = str(trained)
    outcome = TuneTarget(weights=folder).run(tiny_llama(4))
    assert "the target's weights were tuned: on " in outcome.remarks[0]
    program = passes_with(folder, folder).program()
    held = load_file(trained / "heads.safetensors")
    for name, weight in adapters_of(program).items():
        assert torch.equal(weight.load(), held[name])
    assert program.plan.draft.trained  # type: ignore[attr-defined]


def test_adapters_that_do_not_fit_are_refused(trained: Path, tmp_path: Path) -> None:
    held = load_file(trained / "heads.safetensors")
    name = "tuned.layers.1.q.down"
    for wrong, message in (
        ({**held, name: held[name][0]}, "expected"),
        ({n: t for n, t in held.items() if n != name}, f"has no '{name}'"),
        (
            {**held, "tuned.layers.9.q.down": held[name].clone()},
            "for which these options have no place",
        ),
    ):
        with safe_open(trained / "heads.safetensors", "pt") as file:
            save_file(wrong, tmp_path / "w.safetensors", metadata=file.metadata())
        with pytest.raises(PassError, match=message):
            TuneTarget(weights=str(tmp_path / "w.safetensors")).run(tiny_llama(4))


def test_a_change_that_belongs_to_other_weights_is_not_told(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "a")
    change = json.loads((tmp_path / "a/tuned.json").read_text())
    (tmp_path / "a/tuned.json").write_text(json.dumps({**change, "sha256": "0"}))
    outcome = TuneTarget(weights=str(tmp_path / "a")).run(tiny_llama(4))
    assert "by how much is unknown here" in outcome.remarks[0]
    (tmp_path / "a/tuned.json").write_text('{"tokens": "many"}')
    with pytest.raises(PassError, match=r"tuned.json is damaged"):
        TuneTarget(weights=str(tmp_path / "a")).run(tiny_llama(4))


def test_heads_and_target_belong_together(trained: Path, tmp_path: Path) -> None:
    folder = str(trained)
    with pytest.raises(
        PassError, match=r"trained together with the target's weights: add the pass"
    ):
        passes_with(None, folder).program()
    fit(CASES["medusa2"].model(), TEXT, out=tmp_path / "heads", **FEW)
    with pytest.raises(PassError, match=r"has no adapters: it was trained without"):
        TuneTarget(weights=str(tmp_path / "heads")).run(tiny_llama(4))
    with pytest.raises(PassError, match=r"was trained for another target than tune_target makes"):
        passes_with(folder, str(tmp_path / "heads")).program()
    with pytest.raises(PassError, match=r"was trained for another model"):
        TuneTarget(weights=folder).run(tiny_llama(4, seed=9))


# -- the bundled model


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--recipe", "medusa2"], "ask for that with --tune"),
        (["--recipe", "medusa", "--tune"], "--tune is for recipes with the pass tune_target"),
    ],
)
def test_the_command_asks_for_the_flag(asked: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        app(["train", str(DEMO), *asked, "--out", str(tmp_path / "o"), "--steps", "1"])


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_tuning_pays_on_the_bundled_model(name: str, tmp_path: Path) -> None:
    """More is accepted than by what was there before, an artifact keeps it, and the text is that of
    the tuned target without a drafter."""
    from graftwork.training.fit import accepted_per_step

    model = gw.optimize(DEMO, name, target="eager:cpu:float32")
    options = {"steps": 60, "batch": 4, "window": 96, "own": 0.5, "rate": 2e-3}
    made = train_target(model, None, out=tmp_path / "t", **options)
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:8]
    rows = [model.tokenizer.encode(json.loads(line)["text"]).ids for line in lines]
    assert accepted_per_step(made.model, rows) > 0.1 + accepted_per_step(model, rows)
    assert made.change is not None and made.change.divergence < 0.5
    uses = [
        u.name
        for u in gw.Recipe.load(name).passes
        if u.name in ("tune_target", "draft_medusa", "draft_ppd", "draft_streams")
    ]
    recipe = gw.Recipe.load(name).with_options([f"{use}.weights={tmp_path / 't'}" for use in uses])
    again = gw.optimize(DEMO, recipe, target="eager:cpu:float32")
    alone = {"extends": "baseline", "passes": [{"tune_target": {"weights": str(tmp_path / "t")}}]}
    plain = gw.optimize(DEMO, alone, target="eager:cpu:float32")
    asked = {"max_new_tokens": 32, "eos_token_id": []}
    for row in (r[:24] for r in rows):
        wanted = plain.generate([row], **asked)
        assert torch.equal(again.generate([row], **asked), wanted)
    ragged = [row[: 8 + 2 * index] for index, row in enumerate(rows)]
    assert torch.equal(again.generate(ragged, **asked), plain.generate(ragged, **asked))
    again.save(tmp_path / "artifact")
    loaded = gw.load(tmp_path / "artifact")
    assert torch.equal(loaded.generate(ragged, **asked), plain.generate(ragged, **asked))
    with pytest.raises(GraftworkError, match="made from the model itself"):
        train_target(loaded, None, out=tmp_path / "u", **options)
