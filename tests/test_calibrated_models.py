"""Recipes that calibrate, from the front door and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from evidence import tokens
from tiny import tiny_llama

import graftwork as gw
from graftwork.cli import main
from graftwork.data.calibration import TimeLeft
from graftwork.ir import InputError, PassError
from graftwork.optimizing import trace
from graftwork.recipe import Recipe
from graftwork.tracing import traced

CPU = "eager:cpu:float32"
SETTINGS = [f"quantize_weights.{o}" for o in ("group=16", "windows=4", "length=32")]


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint is the handmade program."""

    monkeypatch.setattr(traced, "import_model", lambda model, dtype, **_: tiny_llama())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Text as token ids, a document a line."""
    path = tmp_path / "text.jsonl"
    rows = tokens(32, 400).view(4, 100).tolist()
    path.write_text("".join(f'{{"ids": {row}}}\n' for row in rows))
    return path


def recipe() -> Recipe:
    """GPTQ, on little text."""
    return Recipe.load("gptq").with_options(SETTINGS)


def test_a_calibrated_model_generates_is_validated_and_comes_back(
    data: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    model = gw.optimize(
        "tiny", recipe(), target=CPU, data=data, validate=True, progress=said.append
    )
    assert any("block 2 of 2 [====================] 100%" in line for line in said)
    assert model.report is not None
    check = model.report.passes[-1].check
    assert model.report.passes[-1].name == "quantize_weights" and check is not None
    again = gw.load(model.save(tmp_path / "out"))
    assert again.report == model.report and str(again.program) == str(model.program)
    asked = {"max_new_tokens": 6}
    assert torch.equal(again.generate([[1, 2]], **asked), model.generate([[1, 2]], **asked))
    inside = gw.optimize("tiny", recipe(), target=CPU, data=tokens(32, 400).view(4, 100).tolist())
    assert torch.equal(inside.generate([[1, 2]], **asked), model.generate([[1, 2]], **asked))


def test_data_that_is_missing_or_nowhere_is_refused_before_anything_is_traced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    monkeypatch.setattr(traced, "import_model", None)
    with pytest.raises(InputError, match=r"recipe 'gptq' needs data=.*like those that the model"):
        gw.optimize("tiny", recipe(), target=CPU)
    with pytest.raises(InputError, match=r"data: there is no .*nowhere"):
        gw.optimize("tiny", recipe(), target=CPU, data=tmp_path / "nowhere")
    with pytest.raises(
        InputError, match=r"work= is given, but recipe 'int4' calibrates on no text"
    ):
        gw.optimize("tiny", "int4", target=CPU, work=tmp_path)


def test_text_that_does_not_do_is_refused(data: Path) -> None:
    with pytest.raises(InputError, match=r"4 windows of 32 tokens, 128 in all, .* has 3: give 125"):
        gw.optimize("tiny", recipe(), target=CPU, data=[[1, 2, 3]])
    with pytest.raises(InputError, match=r"data: token id 32 is outside the vocabulary of 32"):
        gw.optimize("tiny", recipe(), target=CPU, data=[[1, 32, 3]])
    with pytest.raises(PassError, match="needs text to calibrate on"):
        gw.optimizing.trace("tiny", recipe(), target=CPU)


def test_the_command_line_takes_text_and_a_folder_to_work_in(data: Path, tmp_path: Path) -> None:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    given = ["optimize", "tiny", "--recipe", "gptq", "--target", CPU, "--data", str(data)]
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main([*given, *settings, *folders])
    assert not ended.value.code and list((tmp_path / "work").rglob("block-0001.safetensors"))
    assert gw.load(tmp_path / "out").generate([[1, 2]], max_new_tokens=3).shape == (1, 5)


def test_programs_of_recipes_that_calibrate_are_shown_and_measured(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["tiny", "--target", CPU, *(a for o in SETTINGS for a in ("--set", o))]
    few = ["--against", "", "--prompts", "1", "--tokens", "2", "--repeats", "1"]
    shown = ["inspect", *args, "--recipe", "gptq", "--summary"]
    measured = ["bench", *args, "--recipes", "baseline,gptq", *few]
    for command, option, said in (
        (shown, "--data", "graftwork.quantized_linear"),
        (measured, "--text", "gptq"),
    ):
        with pytest.raises(SystemExit, match="0"):
            main([*command, option, str(data)])
        assert said in capsys.readouterr().out
    wanted = "needs text to calibrate on", "recipe 'gptq' calibrates: give text= (--text"
    for command, said in zip((shown, measured), wanted, strict=True):
        with pytest.raises(SystemExit, match="2"):
            main(command)
        assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(InputError, match="of the recipes 'baseline' none calibrates"):
        trace("tiny", Recipe.load("baseline"), target=CPU, data=data)


def test_time_left_follows_from_what_was_done_in_this_run() -> None:
    now = 0.0
    said = TimeLeft(lambda: now)
    assert said("block 2 of 4", 0.5) == "block 2 of 4 [==========>         ] 50%"
    now = 60.0
    assert said("block 3 of 4", 0.625).endswith(" 62%, 3:00 left")
    now = 7200.0
    assert said("block 3 of 4", 0.75).endswith(" 75%, 2:00:00 left")
    assert said("block 4 of 4", 1.0) == "block 4 of 4 [====================] 100%, 0:00 left"
