"""`graftwork train`: what counts as training, what is said on the way, and what is left behind."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_cli import CPU, checkpoint, run  # noqa: F401  (a fixture)
from test_training import FEW, TEXT, drafted

import graftwork as gw
from graftwork import training
from graftwork.ir import InputError
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.training import FitState, fit
from graftwork.training import fit as fitting
from graftwork.training.fit import Fit

SMALL = ("--target", CPU, "--batch", 1, "--window", 24, "--own", 0)


def test_preparing_is_not_training(tmp_path: Path) -> None:
    """However little time is given, what is saved has been trained."""
    options = {**FEW, "steps": None, "minutes": 1e-5}
    fitted = fit(drafted(DraftMedusa()), TEXT, out=tmp_path, **options)
    assert fitted.steps >= 1 and math.isfinite(fitted.loss) and fitted.hits


def test_without_a_step_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Fit, "_used_up", lambda self, state: True)
    with pytest.raises(InputError, match=r"no step was made in minutes=0\.01.*nothing is written"):
        fit(drafted(DraftMedusa()), TEXT, out=tmp_path / "out", minutes=0.01, batch=2, window=24)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "settings", "named"),
    [
        pytest.param("judge", [], ("draft_medusa", "verify_judge"), marks=pytest.mark.long),
        ("specdec_plus_plus", ["draft_model.model={}"], ("length_draft_acceptance",)),
        pytest.param("disco", ["draft_model.model={}"], ("length_disco",), marks=pytest.mark.long),
        pytest.param("adaeagle", [], ("draft_eagle", "length_predicted"), marks=pytest.mark.long),
    ],
)
def test_the_last_line_names_every_option_to_set(
    recipe: str,
    settings: list[str],
    named: tuple[str, ...],
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heads = tmp_path / "heads"
    brought = [setting.format(checkpoint) for setting in settings]
    args = ("--recipe", recipe, "--out", heads, "--steps", 2, *SMALL)
    args += tuple(word for setting in brought for word in ("--set", setting))
    code, text, errors = run(capsys, "train", checkpoint, *args)
    assert code == 0, errors
    last = text.strip().splitlines()[-1]
    assert [f"--set {name}.weights={heads}" in last for name in named] == [True] * len(named)
    assert "nan" not in text + errors
    # What it says is what is needed.
    given = [word for word in last.split() if word.endswith(f"weights={heads}")] + brought
    model = gw.optimize(checkpoint, gw.Recipe.load(recipe).with_options(given), target=CPU)
    assert not any(line.remarks for line in model.report.passes)


def test_without_a_terminal_lines_come_now_and_then() -> None:
    """Also while nothing is reported, as in a long step."""
    from graftwork.cli.console import EVERY
    from graftwork.cli.progress import training_progress

    assert EVERY <= 30
    said = io.StringIO()
    with training_progress(Console(file=said), every=0.1, brief=0.1) as update:
        update(FitState("training", 0.25, 7, 2.5))
        time.sleep(0.6)
        update(FitState("training", 0.5, 9, 2.5))
        time.sleep(0.3)
        update(FitState("measuring", 1.0, 400))
        time.sleep(0.3)
    lines = said.getvalue().splitlines()
    assert 4 <= len(lines) <= 13
    assert any(line.startswith("training step 9 loss 2.500, 50%, 0:01 left, ") for line in lines)
    assert lines[0].startswith("training step 7 loss 2.500, 25%")
    assert lines[-1].startswith("measuring, 100%") and "nan" not in said.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("kept", [1, 50])
def test_a_keyboard_interrupt_says_how_to_go_on(
    kept: int,
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*args: Any, progress: Any, **options: Any) -> Any:
        def note(state: FitState) -> None:
            progress(state)
            if state.step == 3:
                raise KeyboardInterrupt

        return fitting(*args, progress=note, save_every=kept, **options)

    heads = tmp_path / "heads"
    args = ("--recipe", "medusa", "--out", heads, "--steps", 4, *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(training, "fit", stopped)
        code, _, errors = run(capsys, "train", checkpoint, *args)
    assert code == 130
    if kept > 3:
        assert "before the first checkpoint" in errors
        return
    assert f"{heads} holds a checkpoint: continue from it with --resume" in errors
    code, text, errors = run(capsys, "train", checkpoint, *args, "--resume")
    assert code == 0 and "4 steps" in text, errors
