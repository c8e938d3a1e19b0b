"""The benchmark of what calibration costs, on a model of two tiny layers."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def test_time_and_memory_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    drawn = runpy.run_path(str(SCRIPTS / "random_llama.py"), run_name="random_llama")
    drawn["write"](drawn["PRESETS"]["tiny"], "float32", tmp_path / "model")
    one = runpy.run_path(str(SCRIPTS / "calibration_cost.py"), run_name="cost")["one"]
    asked = {"method": "gptq", "bits": 4, "group": 32, "windows": 4, "length": 32, "threads": 1}
    given = argparse.Namespace(
        model=tmp_path / "model", work=tmp_path / "work", forward=True, die=0, **asked
    )
    found = one(given)
    layer = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert found["two_layers"] == 2 * layer
    assert found["derivatives"] == 4 * (3 * 64 * 64 + 128 * 128)
    assert 0 < found["solve_seconds"] < found["seconds"] and found["forward_seconds"] > 0
    assert found["resident"] > 0 and len(found["sha256"]) == 16
