"""Every example in a docstring runs and gives what it shows."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import linecache
import pkgutil
import runpy
from pathlib import Path

from selection import in_turn

ROOT = Path(__file__).parents[1]
PACKAGES: list[str] = runpy.run_path(str(ROOT / "setup.py"))["packages"]()


def modules() -> list[str]:
    """Those whose text has an example: looking for them in all takes a minute."""
    names = []
    for package in PACKAGES:
        folder = importlib.import_module(package)
        inner = [m.name for m in pkgutil.iter_modules(folder.__path__) if not m.ispkg]
        names += [package, *(f"{package}.{name}" for name in inner)]
    return [name for name in names if ">>> " in _text(name)]


def _text(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin).read_text(encoding="utf-8")


@in_turn(modules)
def test_examples(name: str) -> None:
    # Every docstring that is run looks for each file that Python remembers lines of: traces by
    # earlier tests leave hundreds.
    linecache.clearcache()
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_examples_are_found() -> None:
    names = ("graftwork.ir.types", "graftwork.ir.support.yamlfile")
    tried = [doctest.testmod(importlib.import_module(name)).attempted for name in names]
    assert all(tried)
