"""The tour and README's first example run, and both stay short enough to read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOUR = ROOT / "docs" / "tour.py"
README = (ROOT / "README.md").read_text()


@pytest.mark.long
def test_the_tour_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(TOUR)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Four runs, one text" in done.stdout


def test_the_tour_is_short() -> None:
    assert len(TOUR.read_text().splitlines()) <= 500


def test_the_first_example_of_the_readme_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # not the clone: so it is typed where the package is installed
    code = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    exec(compile(code, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "    with open(path, 'w') as f:\n" in shown and "draft_suffix" in shown
    assert (tmp_path / "out" / "manifest.json").exists()


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/cli.md", "docs/python.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", (ROOT / page).read_text())
    lost = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not lost
