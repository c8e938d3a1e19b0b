"""What the pages say to type, besides graftwork's own commands (tests/test_commands.py): scripts
with options that they have, extras and targets that exist, and Python that fits the interface."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

import graftwork as gw
from graftwork.report import Report

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
SCRIPT = re.compile(r"(?:^    |`)(?:\w+=\S+ )*python ((?:\w+/)+\w+\.py)((?:[^`\n\\]|\\\n)*)", re.M)


def scripts() -> Iterator[tuple[str, str]]:
    """Scripts of the clone that pages call, and what is behind their names, in one line."""
    for path, rest in dict.fromkeys(SCRIPT.findall(TEXT)):
        if path.startswith("DIR/"):  # an exported folder's, tests/test_export_plan.py
            continue
        yield path, re.split(r"\s(?:#|>)", " ".join(rest.replace("\\\n", " ").split()))[0]


@cache
def source(path: str) -> ast.Module:
    """A script. Errors: of one that is not there."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def flags(path: str) -> frozenset[str]:
    """Options of a script, and of those beside it that it imports from."""
    found, beside = set[str](), (ROOT / path).parent
    for node in ast.walk(source(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if node.value.startswith("--") else set()
        if isinstance(node, ast.ImportFrom) and (beside / f"{node.module}.py").is_file():
            found |= flags(f"{beside.relative_to(ROOT)}/{node.module}.py")
        if isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith("f'--{"):
            keywords = (k.arg for k in ast.walk(source(path)) if isinstance(k, ast.keyword))
            found |= {f"--{name}" for name in keywords}  # an option for each field
    return frozenset(found)


@pytest.mark.parametrize(("path", "rest"), list(scripts()))
def test_scripts_have_what_is_asked_of_them(path: str, rest: str) -> None:
    asked = {word for word in shlex.split(rest) if word.startswith("--")}
    assert asked <= flags(path)


def test_scripts_are_found() -> None:
    assert len(list(scripts())) > 40
    assert {"benchmarks/real.py", "benchmarks/decode.py"} <= {path for path, _ in scripts()}


def test_extras_and_targets_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = re.findall(r"(?:graftwork|\.|\.whl)\[([\w,]+)\]'", TEXT)
    assert asked and set(",".join(asked).split(",")) <= set(project["optional-dependencies"])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    made = set(re.findall(r"`make ([a-z]+)", TEXT))
    assert made and made <= targets


def blocks() -> list[Any]:
    """Fenced Python of the pages."""
    found = []
    for page in PAGES:
        for number, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S)):
            found.append(pytest.param(text, id=f"{page.stem}-{number}"))
    return found


@pytest.mark.parametrize("text", blocks())
def test_python_fits_the_interface(text: str) -> None:
    """Names of the package and of a model exist, and take the keywords that they are given."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            assert owner(node.value) is None or named(node) is not None, ast.unparse(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called = named(node.func)
        if called is None or not callable(called):
            continue
        taken = inspect.signature(called).parameters.values()
        free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken)
        given = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        assert free or given <= {one.name for one in taken}, ast.unparse(node)


def owner(node: ast.expr) -> Any:
    """What an expression is: the package, a model, a report, one of their attributes; or None."""
    if isinstance(node, ast.Name):
        return {"gw": gw, "fast": gw.Model, "medusa": gw.Model}.get(node.id)
    found = named(node) if isinstance(node, ast.Attribute) else None
    return None if isinstance(found, property | cached_property) else found  # others' classes


def named(node: ast.Attribute) -> Any:
    """An attribute of what has attributes to us, or None."""
    inside = owner(node.value)
    if inside is gw.Model and node.attr in {"program", "report"}:
        return {"program": gw.ir.Program, "report": Report}[node.attr]
    return getattr(inside, node.attr, None)
