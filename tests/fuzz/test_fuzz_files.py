"""Short runs of mutated files (`python tests/fuzz/files.py` makes more)."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from files import SURFACES, summary, verdict


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in SURFACES if name != "node"])
def test_mutated_files_are_refused_or_mean_what_they_say(name: str, tmp_path: Path) -> None:
    surface, base = SURFACES[name], tmp_path / "base"
    if name not in ("plan", "manifest"):
        base.mkdir()
    surface.make(base)
    expected = None if name == "recipe" else surface.said(base)
    said = []
    for index in range(10):
        target = tmp_path / str(index)
        shutil.copytree(base, target)
        rng = random.Random(index)
        said.append((surface.damage(rng, target), verdict(surface, target, expected)))
    assert {what for _, what in said} <= {"refused", "accepted"}, said
    assert "refused" in {what for _, what in said}


@pytest.mark.long
def test_mutated_files_in_processes_that_are_watched() -> None:
    counts, faults = summary(seed=2, mutations=180, processes=1)
    assert not faults, "\n".join(faults)
    assert counts["mutations"] >= 180
    assert all(counts[f"{name} refused"] > 4 for name in SURFACES if name != "node")
