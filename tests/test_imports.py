"""Imports point one way: ir <- frontends; ir <- passes <- backends; ir <- runtime."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "ir": {"ir"},
    "frontends": {"frontends", "ir"},
    "passes": {"passes", "ir"},
    "backends": {"backends", "passes", "ir"},
    "runtime": {"runtime", "ir"},
    "recipes": {"recipes"},
}
FILES = [path for part in ALLOWED for path in sorted((ROOT / part).rglob("*.py"))]


def module_of(path: Path) -> list[str]:
    """``ir/ops/norm.py`` is graftwork.ir.ops.norm; the folder graftwork is graftwork itself."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    package = parts if parts[0] == "graftwork" else ["graftwork", *parts]
    return package


def imported(source: str, module: list[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a file imports, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def violations(source: str, module: list[str], allowed: set[str]) -> list[str]:
    """Imports of graftwork's parts that are not allowed."""
    found = []
    for line, name in imported(source, module):
        parts = name.split(".")
        if parts[0] == "graftwork" and (len(parts) < 2 or parts[1] not in allowed):
            found.append(f"line {line}: {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_direction(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0]
    assert violations(path.read_text(), module_of(path), ALLOWED[part]) == []


def test_the_check_sees_violations() -> None:
    source = "from ..passes import base\nfrom .. import backends\nimport graftwork.runtime\n"
    found = violations(source, ["graftwork", "ir", "x"], {"ir"})
    assert [f.split(": ")[1] for f in found] == [
        "graftwork.passes.base",
        "graftwork.backends",
        "graftwork.runtime",
    ]


def test_private_torch_is_confined() -> None:
    """Torch's private modules are used in three files of ir (see also test_ir_infer.py)."""
    users = {}
    for path in sorted((ROOT / "ir").rglob("*.py")):
        names = [name for _, name in imported(path.read_text(), module_of(path))]
        private = {n for n in names if n.startswith(("torch._", "torch.fx.experimental"))}
        if private:
            users[path.name] = private
    assert set(users) <= {"infer.py", "pattern.py", "expand.py"}, users


def late_imports(source: str) -> list[int]:
    """Lines in functions that import files of this package."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    inside = {node for fn in functions for node in ast.walk(fn)}
    return sorted(n.lineno for n in inside if isinstance(n, ast.ImportFrom) and n.level)


@pytest.mark.parametrize("part", ["ir", "passes", "backends", "runtime"])
def test_no_file_needs_a_late_import(part: str) -> None:
    """Files that import each other are one file, or one too many: none waits for another's end.
    Other packages may be imported late, because they take a while."""
    late = {str(p): late_imports(p.read_text()) for p in sorted((ROOT / part).rglob("*.py"))}
    assert not {path: lines for path, lines in late.items() if lines}


def test_late_imports_are_seen() -> None:
    assert late_imports("from .a import b\ndef f():\n    from .c import d\n    import torch\n") == [
        3
    ]
