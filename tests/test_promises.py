"""Every test that docs/promises.md names exists."""

import ast
import re
from functools import cache
from pathlib import Path

from selection import in_turn

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    line
    for line in (ROOT / "docs" / "promises.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| promise |")
]


@cache
def _tests_in(path: Path) -> set[str]:
    """Names of the test functions of a file, as pytest would select them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@in_turn(lambda: ROWS)
def test_a_promise_names_tests_that_exist(row: str) -> None:
    """A row's last cell holds `tests/<file>::<test>`, once or several times."""
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", row.split("|")[-2])
    assert named, f"no test is named: {row}"
    for file, test in named:
        assert (ROOT / file).is_file(), f"{file} does not exist"
        assert not test or test in _tests_in(ROOT / file), f"{file} has no {test}"
