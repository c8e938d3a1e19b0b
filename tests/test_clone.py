"""A clone runs its own code: without being installed, and beside an editable install of another."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from graftwork import _clone

ROOT = Path(__file__).parents[1]
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]


def test_the_finder_and_the_build_agree_where_parts_are() -> None:
    assert {"graftwork": "graftwork", **_clone.FOLDERS} == FOLDERS


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second clone, under another name and not installed."""
    found = tmp_path_factory.mktemp("clones") / "second"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, found / folder, ignore=ignore)
    return found


def run(clone: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.long
def test_a_clone_runs_its_own_code(clone: Path) -> None:
    """The interpreter of this test has another clone installed (in editable form, by make)."""
    names = ["graftwork", *_clone.FOLDERS, "graftwork.ir.ops", "graftwork.passes.engine.base"]
    code = f"import importlib\nfor n in {names}: print(importlib.import_module(n).__file__)"
    files = [Path(line) for line in run(clone, "-c", code).split()]
    assert len(files) == len(names) and all(f.is_relative_to(clone) for f in files), files


@pytest.mark.long
def test_the_command_line_runs_in_a_clone_that_is_not_installed(clone: Path) -> None:
    """-S would hide the dependencies, so the editable install's finder is taken out by hand."""
    code = (
        "import sys, runpy;"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in str(f)];"
        "sys.path.insert(0, '.'); sys.argv = ['graftwork', 'recipes', 'copyspec'];"
        "runpy.run_module('graftwork', run_name='__main__')"
    )
    assert "copyspec" in run(clone, "-c", code)


def test_a_wheel_needs_no_finder(tmp_path: Path) -> None:
    """Where parts lie inside the package, Python finds them by itself."""
    inside = tmp_path / "graftwork"
    ignore = shutil.ignore_patterns("__pycache__", "demo_model")
    shutil.copytree(ROOT / "graftwork", inside, ignore=ignore)
    (inside / "ir").mkdir()
    (inside / "ir" / "__init__.py").write_text("")
    code = "import sys, graftwork, graftwork.ir; print(graftwork.ir.__file__, sys.meta_path[0])"
    printed = run(tmp_path, "-c", code)
    assert str(inside / "ir") in printed and "CloneFinder" not in printed
