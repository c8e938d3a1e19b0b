"""The proof by tokens runs, goes on where it was interrupted, and can fail."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.resources import files
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "lossless.py"
ASKED = "--recipes copyspec --targets eager --batches 1,2 --count 3 --tokens 6 --length 9"


def proved(monkeypatch: pytest.MonkeyPatch, out: Path, asked: str = ASKED) -> int:
    """Run the script on the bundled model; its exit status."""
    model = str(files("graftwork") / "demo_model")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), model, *asked.split(), "--json", str(out)])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.mark.long
def test_rows_are_written_once_and_a_wrong_text_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert proved(monkeypatch, out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["batch"], row["same"], row["prompts"]) for row in rows] == [(1, 3, 3), (2, 3, 3)]
    assert capsys.readouterr().err.count("the same") == 2

    out.write_text(json.dumps({**rows[0], "same": 2}) + "\n")
    assert proved(monkeypatch, out) == 1
    again = capsys.readouterr()
    assert again.err.count("the same") == 1
    assert "2/3" in again.out and "3/3" in again.out
    assert len(out.read_text().splitlines()) == 2


def test_recipes_that_promise_no_equal_texts_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert proved(monkeypatch, out, ASKED.replace("copyspec", "copyspec,int8")) == 2
    assert "int8 is approximate" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.sweep
def test_texts_of_another_recipe_may_be_the_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ASKED.replace("copyspec", "int8_copyspec").replace("eager", "onnxruntime")
    assert proved(monkeypatch, tmp_path / "rows.jsonl", f"{asked} --reference int8") == 0
    said = capsys.readouterr()
    assert said.err.count("3/3 the same") == 2
    assert "texts equal to int8's" in said.out


def test_the_page_is_drawn_from_the_rows_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = runpy.run_path(str(SCRIPT))
    docs = SCRIPT.parents[1] / "docs"
    rows = script["known"](docs / "lossless.jsonl")
    page = (docs / "lossless.md").read_text(encoding="utf-8")
    assert page.endswith("\n\n" + script["markdown"](rows))
    assert all(row["same"] == row["prompts"] for row in rows if "none" not in row)

    kept = [{**rows[0], "batch": 1}, {**rows[0], "batch": 4, "same": 7, "tokens_per_step": 9.0}]
    drawn = script["markdown"]([*kept, {**rows[0], "recipe": "other", "none": "why not"}])
    first = rows[0]
    assert f"| `{first['recipe']}` | 15/16 ({first['tokens_per_step']:.2f}) |" in drawn
    assert drawn.endswith("\n\n`other`: why not\n")
