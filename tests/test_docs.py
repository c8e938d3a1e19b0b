"""The tour runs from end to end, and stays short enough to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).parent.parent / "docs" / "tour.py"


@pytest.mark.long
def test_the_tour_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(TOUR)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Four runs, one text" in done.stdout


def test_the_tour_is_short() -> None:
    assert len(TOUR.read_text().splitlines()) <= 500
