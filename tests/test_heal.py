"""Healing: the layers that are left learn to say what all of them said."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from archs import ARCHS, build
from safetensors.torch import load_file
from test_train_exits import TEXT

import graftwork as gw
from graftwork.cli.commands import app
from graftwork.cli.demo import demo_folder
from graftwork.data.corpus import SAMPLE
from graftwork.ir import InputError
from graftwork.optimizing import trace
from graftwork.recipe import Recipe
from graftwork.training.heal import HealTrainer, kept_layers

FEW = {"steps": 40, "batch": 4, "window": 24, "rate": 3e-3}
ONE = Recipe.load({"extends": "baseline", "passes": [{"skip_layers": {"layers": [1]}}]})


def healed(recipe: Recipe, *settings: str) -> tuple[torch.nn.Module, HealTrainer]:
    model = build(ARCHS["llama"])
    kept, _, _ = kept_layers(model, recipe.with_options(settings))
    names = {name for name, _ in model.named_parameters()}
    return model, HealTrainer(trace(model, target="eager"), kept, names, torch.device("cpu"))


def test_masks_by_hand() -> None:
    decay = Recipe.load("d3").with_options(["depth_decay.alpha=0.5", "depth_decay.least=1"])
    kept, said, _ = kept_layers(build(ARCHS["llama"]), decay)
    layers = 2
    assert "alpha=0.5" in said
    # A prompt of 2 runs through all; floor(2 * 0.5^i) layers of those behind it, 1 at least.
    wanted = [[1, 1], [1, 1], [1, 1], [1, 0], [1, 0]]
    assert kept.mask(5, 2, layers).tolist() == wanted
    kept, _, _ = kept_layers(build(ARCHS["llama"]), ONE)
    assert kept.mask(3, 0, layers).tolist() == [[1, 0]] * 3


def test_layers_that_a_text_chose_are_named(tmp_path: Path) -> None:
    """The healed model would miss others least."""
    recipe = Recipe.load("skip_layers").with_options(["skip_layers.count=1"])
    _, said, named = kept_layers(str(demo_folder()), recipe)
    (use,) = (use for use in named.passes if use.name == "skip_layers")
    ((gone,),) = (use.options["layers"],)
    assert said == f"layers {[layer for layer in range(6) if layer != gone]}"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [(ONE, ()), (Recipe.load("d3"), ("depth_decay.alpha=0.7", "depth_decay.least=1"))],
    ids=["set", "budget"],
)
def test_the_student_is_the_model_that_decodes(recipe: Recipe, settings: tuple[str, ...]) -> None:
    """Its log probabilities are those of `model(ids)`, and the teacher's the whole model's."""
    model, trainer = healed(recipe, *settings)
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
