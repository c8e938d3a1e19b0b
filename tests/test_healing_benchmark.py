"""The benchmark of healing: its cells, what it does not measure again, its table and picture."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from graftwork.cli.demo import demo_folder
from graftwork.data.corpus import SAMPLE

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "healing.py"
POINT = "skip_layers skip_layers.layers=[1]"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the script on the bundled model; its rows."""
    prompts, text = tmp_path / "prompts.jsonl", tmp_path / "text.jsonl"
    prompts.write_text('{"text": "def f(x):"}\n')
    text.write_text(json.dumps({"text": SAMPLE.read_text()[:1500]}) + "\n")
    rows = tmp_path / "rows.json"
    given = [str(demo_folder()), "--data", str(SAMPLE), "--text", f"prose={text}"]
    given += ["--prompts", str(prompts), "--out", str(tmp_path / "out"), "--json", str(rows)]
    given += ["--tokens", "4", "--steps", "1", "--window", "32", "--threads", "1"]
    given += ["--svg", str(tmp_path / "p.svg"), "--markdown", str(tmp_path / "p.md")]

    def ran(*asked: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given, *asked])
        monkeypatch.syspath_prepend(str(SCRIPT.parent))
        runpy.run_path(str(SCRIPT), run_name="__main__")
        found: list[dict[str, Any]] = json.loads(rows.read_text())
        return found

    return ran


@pytest.mark.long
def test_cells_are_measured_once(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    target = ("--target", "eager:cpu:float32", "--points", POINT)
    first = run(*target, "--ways", "none,lora")
    assert [(row["point"], row["way"]) for row in first] == [(POINT, "none"), (POINT, "lora")]
    assert first[1]["steps"] == 1 and first[0]["layers"] == pytest.approx(5 / 6, rel=1e-3)
    assert all(row["prose"]["divergence"] > 0 for row in first)
    again = run(*target, "--ways", "none,full,lora")
    assert again[:2] == first and again[2]["way"] == "full"
    assert (tmp_path / "p.md").read_text().count("`skip_layers`") == 3


def test_a_table_and_a_picture(run: Any, tmp_path: Path) -> None:
    """Of rows that stand in the file, nothing is run."""
    cost = {"divergence": 0.3, "ratio": 1.3, "error": 0.02, "agreement": 0.7, "perplexity": 9.0}
    row = {"point": POINT, "way": "none", "prose": cost, "same": 1, "texts": 8, "kept": 0.25}
    row |= {"layers": 0.9, "speed": 1.05}
    healed = {**row, "way": "lora", "steps": 30, "prose": {**cost, "divergence": 0.2}}
    (tmp_path / "rows.json").write_text(json.dumps([healed, row]))
    run("--points", POINT, "--ways", "none,lora")
    lines = (tmp_path / "p.md").read_text().splitlines()
    assert lines[2].startswith("| `skip_layers`, `skip_layers.layers=[1]` |  |  | 0.900 | 0.300,")
    assert "| lora | 30 | 0.900 | 0.200, 1.300 ± 0.020, 70.0% | 1/8 (25%) | 1.05 |" in lines[3]
    assert "<svg" in (tmp_path / "p.svg").read_text()
    with pytest.raises(SystemExit):
        run("--ways", "half")
