"""The benchmark of layers: what it measures of each part, and which set it chooses."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "layer_importance.py"
MODEL = str(files("graftwork") / "demo_model")


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *asked: str) -> dict[str, Any]:
    """What the script says of the bundled model."""
    text, out = tmp_path / "text.py", tmp_path / "out.json"
    text.write_text("def area(width, height):\n    return width * height\n" * 40)
    given = ["--text", str(text), "--length", "24", "--windows", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), MODEL, *given, "--json", str(out), *asked])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.long
def test_the_set_is_the_one_that_is_missed_least(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = measured(monkeypatch, tmp_path, "--budget", "1")
    rows = report["parts"]
    cheapest = min(rows, key=lambda name: rows[name]["nats"])
    assert report["chosen"] == {"layers": [int(cheapest.split()[1])]}
    assert report["then"] - report["nats"] == pytest.approx(rows[cheapest]["nats"], abs=2e-4)
    assert all(-1 <= row["cosine"] <= 1 for row in rows.values()) and len(rows) > 1
    layer = report["chosen"]["layers"][0]
    assert f"--set skip_layers.layers=[{layer}]" in capsys.readouterr().out
    alike = measured(
        monkeypatch, tmp_path, "--budget", "1", "--by", "cosine", "--parts", "sublayers"
    )
    best = max(alike["parts"], key=lambda name: alike["parts"][name]["cosine"])
    name, number = best.split()
    assert alike["chosen"] == {name: [int(number)]}
    assert len(alike["parts"]) == 2 * len(rows)


@pytest.mark.long
def test_a_budget_that_leaves_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="--budget 99"):
        measured(monkeypatch, tmp_path, "--budget", "99")
