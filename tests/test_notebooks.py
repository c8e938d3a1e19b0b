"""The notebooks of examples/ run from the first cell to the last, and are kept without outputs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def shown(code: str, scope: dict[str, Any]) -> Any:
    """Run a cell; its last expression's value, as a notebook shows it."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), scope)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), scope)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_no_outputs(path: Path) -> None:
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert (kept["nbformat"], kept["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in kept["cells"]}) == len(kept["cells"])
    for cell in kept["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == (
            [],
            None,
        )


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_steps", "own_recipe"]


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    pictures = 0
    for cell in cells(path):
        if cell["cell_type"] == "code":
            value = shown("".join(cell["source"]), scope)
            pictures += hasattr(value, "_repr_html_") and "<table" in value._repr_html_()
    assert pictures >= 2
    said = capsys.readouterr().out
    if path.stem == "first_steps":
        assert "copyspec" in said and "KL" in said and (tmp_path / "report.html").is_file()
        steps = [int(count) for count in re.findall(r"(\d+) steps for 48", said)]
        assert len(steps) == 2 and steps[1] < steps[0]
    else:
        assert "did you mean" in said and said.count("a step") == 3
