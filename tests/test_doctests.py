"""Every example in a docstring runs and gives what it shows."""

from __future__ import annotations

import doctest
import importlib
import linecache
import pkgutil
import runpy
from pathlib import Path

from selection import in_turn

ROOT = Path(__file__).parents[1]
PACKAGES: list[str] = runpy.run_path(str(ROOT / "setup.py"))["packages"]()


def modules() -> list[str]:
    names = []
    for package in PACKAGES:
        folder = importlib.import_module(package)
        inner = [m.name for m in pkgutil.iter_modules(folder.__path__) if not m.ispkg]
        names += [package, *(f"{package}.{name}" for name in inner)]
    return names


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
