"""Healing: the layers that are left learn to say what all of them said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from archs import ARCHS, build
from safetensors.torch import load_file
from test_train_exits import TEXT

import graftwork as gw
from graftwork.cli.commands import app
from graftwork.cli.demo import demo_folder
from graftwork.data.corpus import SAMPLE, Tiles
from graftwork.ir import InputError
from graftwork.optimizing import trace
from graftwork.recipe import Recipe
from graftwork.training.heal import HealTrainer, kept_layers
from graftwork.training.net import Net
from graftwork.training.teacher_cache import Lessons, Teacher

FEW = {"steps": 40, "batch": 4, "window": 24, "rate": 3e-3}
ONE = Recipe.load({"extends": "baseline", "passes": [{"skip_layers": {"layers": [1]}}]})


def healed(folder: Path, recipe: Recipe, *settings: str) -> tuple[torch.nn.Module, HealTrainer]:
    model = build(ARCHS["llama"])
    program, cpu = trace(model, target="eager"), torch.device("cpu")
    kept, _, _ = kept_layers(model, recipe.with_options(settings), program)
    names = {name for name, _ in model.named_parameters()}
    teacher = Lessons(folder, Teacher(Net(program, [], cpu)))
    return model, HealTrainer(program, kept, names, cpu, teacher.logits)


def test_masks_by_hand() -> None:
    decay = Recipe.load("d3").with_options(["depth_decay.alpha=0.5", "depth_decay.least=1"])
    model = build(ARCHS["llama"])
    program = trace(model, target="eager")
    kept, said, _ = kept_layers(model, decay, program)
    layers = 2
    assert "alpha=0.5" in said
    # A prompt of 2 runs through all; floor(2 * 0.5^i) layers of those behind it, 1 at least.
    wanted = [[1, 1], [1, 1], [1, 1], [1, 0], [1, 0]]
    assert kept.mask(5, 2, layers).tolist() == wanted
    kept, _, _ = kept_layers(model, ONE, program)
    assert kept.mask(3, 0, layers).tolist() == [[1, 0]] * 3


def test_layers_that_a_text_chose_are_named(tmp_path: Path) -> None:
    """The healed model would miss others least."""
    recipe = Recipe.load("skip_layers").with_options(["skip_layers.count=1"])
    demo = str(demo_folder())
    _, said, named = kept_layers(demo, recipe, trace(demo, target="eager"))
    (use,) = (use for use in named.passes if use.name == "skip_layers")
    ((gone,),) = (use.options["layers"],)
    assert said == f"layers {[layer for layer in range(6) if layer != gone]}"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [(ONE, ()), (Recipe.load("d3"), ("depth_decay.alpha=0.7", "depth_decay.least=1"))],
    ids=["set", "budget"],
)
def test_the_student_is_the_model_that_decodes(
    recipe: Recipe, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Its log probabilities are those of `model(ids)`, and the teacher's the whole model's."""
    model, trainer = healed(tmp_path, recipe, *settings)
    ids = torch.tensor(TEXT[0])[None, :14]
    prompt = int(trainer.kept.whole)
    with torch.no_grad():
        said, wanted = trainer._both(ids, prompt)
        whole = model(ids).logits
    torch.testing.assert_close(wanted, whole.log_softmax(-1), atol=2e-5, rtol=1e-4)
    made = gw.optimize(model, recipe.with_options([*settings]), target="eager")
    torch.testing.assert_close(said, made(ids).log_softmax(-1), atol=2e-4, rtol=1e-3)


def test_a_healed_checkpoint_says_what_the_whole_model_said(tmp_path: Path) -> None:
    model = build(ARCHS["llama"])
    made = gw.heal(model, ONE, TEXT, out=tmp_path / "m", **{**FEW, "steps": 150})
    assert made.steps == 150 and made.after.divergence < 0.7 * made.before.divergence
    fast = gw.optimize(tmp_path / "m", made.recipe, target="eager")
    assert fast.report is not None
    assert len(load_file(tmp_path / "m/model.safetensors")) > len(fast.program.weights)


@pytest.mark.long
def test_an_interrupted_run_goes_on_and_belongs_to_its_layers(tmp_path: Path) -> None:
    short = {**FEW, "steps": 4, "save_every": 2}
    gw.heal(build(ARCHS["llama"]), ONE, TEXT, out=tmp_path / "m", **short)
    state = json.loads((tmp_path / "m/training/state.json").read_text())
    assert state["step"] == 4
    more = {**short, "steps": 6, "resume": True}
    assert gw.heal(build(ARCHS["llama"]), ONE, TEXT, out=tmp_path / "m", **more).steps == 6
    other = {"extends": "baseline", "passes": [{"skip_layers": {"layers": [0]}}]}
    with pytest.raises(InputError, match="belongs to another model or objective"):
        gw.heal(build(ARCHS["llama"]), Recipe.load(other), TEXT, out=tmp_path / "m", **more)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("int8", "leaves out no layers that training could make up for"),
        (Recipe.load("skip_layers").with_options(["skip_layers.count=0"]), "options name no layer"),
        (
            Recipe.load({"extends": "baseline", "passes": [{"skip_layers": {"mlp": [1]}}]}),
            "no whole layer of 2",
        ),
    ],
)
def test_what_has_nothing_to_heal_is_refused(
    recipe: str | Recipe, message: str, tmp_path: Path
) -> None:
    with pytest.raises(gw.GraftworkError, match=message):
        gw.heal(build(ARCHS["llama"]), recipe, TEXT, out=tmp_path / "m", steps=1)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("lora", [0, 4])
def test_weights_of_few_bits_are_refused_before_they_are_read(
    lora: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["graftwork.training.heal"], "trace", None)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    options = {"out": tmp_path / "m", "steps": 1, "lora": lora}
    with pytest.raises(InputError, match=r"is quantized, and weights of few bits .* merged"):
        gw.heal(tmp_path, ONE, TEXT, **options)
    model = build(ARCHS["llama"])
    model.hf_quantizer = object()
    with pytest.raises(InputError, match="the model in memory is quantized"):
        gw.heal(model, ONE, TEXT, **options)
    with pytest.raises(InputError, match="is quantized"):
        gw.train_exits(tmp_path, TEXT, **options)


def test_texts_that_fill_no_window_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"36 tokens are left .* takes 49: give more text"):
        gw.heal(build(ARCHS["llama"]), ONE, [[1] * 40], out=tmp_path / "m", steps=1, window=48)


@pytest.mark.parametrize("lora", [0, 4])
def test_the_model_in_memory_stays_and_the_teacher_with_it(lora: int, tmp_path: Path) -> None:
    """Also when checkpoints are written on the way."""
    model = build(ARCHS["llama"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gw.heal(model, ONE, TEXT, out=tmp_path / "m", **{**FEW, "steps": 3, "save_every": 1}, lora=lora)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not (tmp_path / "m" / "lessons").exists()


def test_what_the_teacher_said_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = build(ARCHS["llama"]), {**FEW, "steps": 6, "lessons": tmp_path / "said"}
    first = gw.heal(model, ONE, TEXT, out=tmp_path / "a", **options)
    said = sorted((tmp_path / "said").iterdir())
    asked: list[int] = []
    states = Teacher.states

    def counted(self: Teacher, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        asked.append(len(tokens))
        return states(self, tokens)

    monkeypatch.setattr(Teacher, "states", counted)
    again = gw.heal(model, ONE, TEXT, out=tmp_path / "b", **options)
    assert asked == [] and (again.before, again.after) == (first.before, first.after)
    said[0].write_bytes(b"no tensors")
    assert gw.heal(model, ONE, TEXT, out=tmp_path / "c", **options).after == first.after
    assert len(asked) == 1
    # Another model is another teacher, though its embedding is the same.
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    gw.heal(model, ONE, TEXT, out=tmp_path / "d", **options)
    assert len(asked) == 1 + len(said)


def test_windows_side_by_side_are_all_read_before_one_comes_again() -> None:
    tiles = Tiles([list(range(50)), list(range(50, 103))], 10, seed=3)
    batches = [tiles(number, 4) for number in range(6)]
    assert [len(batch) for batch in batches[:3]].count(2) == 1  # ten windows in fours
    for epoch in (batches[:3], batches[3:]):
        assert sorted(torch.cat(epoch)[:, 0].tolist()) == list(range(0, 100, 10))
    each = [
        {tuple(sorted(b[:, 0].tolist())) for b in epoch} for epoch in (batches[:3], batches[3:])
    ]
    assert each[0] == each[1] and torch.equal(tiles(4, 4), batches[4])


def test_a_file_of_few_bits_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="expected a checkpoint folder"):
        gw.heal(tmp_path / "small.gguf", ONE, TEXT, out=tmp_path / "m", steps=1)


def test_the_command_names_the_layers_that_were_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [str(demo_folder()), "--out", str(tmp_path / "m"), "--recipe", "skip_layers"]
    told += ["--set", "skip_layers.count=1", "--data", str(SAMPLE), "--steps", "1"]
    with pytest.raises(SystemExit) as end:
        app(["train", *told, "--window", "32", "--batch", "1"])
    assert end.value.code in (0, None)
    said = capsys.readouterr().out
    assert re.search(r"--set skip_layers.layers=\[\d\]", said) and "KL 0." in said
