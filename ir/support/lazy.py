"""Packages whose names are loaded on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def names_of(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: its names are those in the ``__all__`` of a module, which
    is imported when the first of them is used. Files beside it that need less stay cheap to import.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):  # asked of every package by the import system
            raise AttributeError(name)
        home = importlib.import_module(module)
        if name not in home.__all__:
            raise AttributeError(f"module {module.rpartition('.')[0]!r} has no attribute {name!r}")
        return getattr(home, name)

    return find
