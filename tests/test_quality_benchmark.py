"""The benchmark of quality: what it scores, and how it compares."""

from __future__ import annotations

import json
import math
import runpy
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "quality.py"
MODEL = str(files("graftwork") / "demo_model")


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, *asked: str) -> dict:
    """What the script says of the bundled model."""
    given = ["--target", "eager", "--length", "24", "--threads", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), MODEL, *given, *asked])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads(out.read_text())


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two files, of which a list names one."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("nothing that anybody asked for " * 40)
    (folder / "b.txt").write_text("def area(width, height):\n    return width * height\n" * 40)
    (tmp_path / "files.json").write_text(json.dumps({"files": ["b.txt"]}))
    return folder


@pytest.mark.long
def test_fewer_bits_cost_more_and_take_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, texts: Path
) -> None:
    two = "int4.quantize_weights.bits=2"
    asked = ("--text", str(texts), "--files", str(tmp_path / "files.json"), "--windows", "4")
    report = measured(
        monkeypatch, tmp_path / "out.json", *asked, "--recipes", "int8,int4", "--set", two,
        "--tokens", "3", "--count", "1", "--rounds", "1",
    )  # fmt: skip
    rows = report["rows"]
    assert list(rows) == ["baseline", "int8", "int4"]
    assert rows["baseline"]["ratio"] == 1 and rows["baseline"]["error"] == 0
    assert abs(rows["int8"]["ratio"] - 1) < abs(rows["int4"]["ratio"] - 1)
    assert rows["int4"]["error"] > 0
    assert rows["baseline"]["kl"] == 0 and rows["baseline"]["agreement"] == 1
    assert 0 < rows["int8"]["kl"] < rows["int4"]["kl"]
    assert rows["int8"]["agreement"] >= rows["int4"]["agreement"]
    assert rows["int4"]["weight_bytes"] < rows["int8"]["weight_bytes"]
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert report["windows"].startswith("0..3 of 24 tokens, sha256 ")
    other = measured(
        monkeypatch, tmp_path / "other.json", "--text", str(texts), "--windows", "4",
        "--recipes", "int8", "--tokens", "0",
    )  # fmt: skip
    assert other["windows"] != report["windows"]  # other text, and it shows


def test_ratios_are_of_paired_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    compared = runpy.run_path(str(SCRIPT))["compared"]
    ratio, error = compared([2.0, 3.0, 4.0], [1.5, 2.5, 3.5])
    assert ratio == pytest.approx(math.exp(0.5)) and error == pytest.approx(0, abs=1e-12)
    ratio, error = compared([1.0, 2.0], [1.0, 1.0])
    assert ratio == pytest.approx(math.exp(0.5))
    assert error == pytest.approx(math.exp(0.5) * 0.5)


def test_windows_begin_as_texts_of_the_model_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    cut = runpy.run_path(str(SCRIPT))["cut"]

    def windows(first: list[int], last: list[int]) -> list[list[int]]:
        def encode(text: str) -> SimpleNamespace:
            return SimpleNamespace(ids=[*first, *map(int, text.split()), *last])

        program = SimpleNamespace(info=SimpleNamespace(bos=2))
        made = cut(SimpleNamespace(encode=encode), program, ["3 4 5", "6 7 8 9"], 3, 4)
        found: list[list[int]] = made.tolist()
        return found

    assert windows([], []) == [[3, 4, 5], [6, 7, 8]]
    assert windows([2], []) == [[2, 3, 4], [2, 5, 6], [2, 7, 8]]
    assert windows([], [1]) == [[3, 4, 5], [1, 6, 7], [8, 9, 1]]


def test_a_jsonl_holds_several_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    lines = [json.dumps({"text": text}) for text in ("one\ntwo", "three")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("four\n")
    found = runpy.run_path(str(SCRIPT))["read_texts"](tmp_path, None)
    assert found == ["one\ntwo", "three", "four\n"]


@pytest.mark.long
def test_too_little_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, texts: Path
) -> None:
    (texts / "short.txt").write_text("short")
    with pytest.raises(SystemExit, match="tokens make no two windows of 24"):
        measured(monkeypatch, tmp_path / "out.json", "--text", str(texts / "short.txt"))


@pytest.mark.sweep
def test_a_table_of_methods_calibrates_on_other_text_than_it_scores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = ("--text", str(texts), "--files", str(tmp_path / "files.json"), "--windows", "4")
    little = ("--calibration-tokens", "200", "--calibration-windows", "4")
    asked = (*held, "--recipes", "", "--tokens", "0", "--methods", "rtn,gptq", "--bits", "2:64")
    more = ("--calibration", str(texts), *little, "--calibration-length", "24")
    report = measured(monkeypatch, tmp_path / "out.json", *asked, *more)
    rows = report["rows"]
    assert list(rows) == ["baseline", "rtn 2 bits g64", "gptq 2 bits g64"]
    assert rows["rtn 2 bits g64"]["weight_bytes"] == rows["gptq 2 bits g64"]["weight_bytes"]
    assert rows["rtn 2 bits g64"]["ratio"] != rows["gptq 2 bits g64"]["ratio"]
    assert "| 2 g64 |" in capsys.readouterr().out
    (texts / "a.txt").unlink()
    with pytest.raises(SystemExit, match="--calibration: 0 tokens, expected 200"):
        measured(monkeypatch, tmp_path / "out.json", *asked, *more)
    with pytest.raises(SystemExit, match="say on which texts"):
        measured(monkeypatch, tmp_path / "out.json", *asked)
