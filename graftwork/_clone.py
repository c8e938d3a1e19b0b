"""Imports from a clone that is not installed.

A clone has the package's parts beside the folder `graftwork` (`ir/`, `passes/`, ...), a wheel has
them inside. `install` adds a finder that maps `graftwork.ir` to `ir/` of the clone of `graftwork`.
It comes first in `sys.meta_path`, before the finders of editable installs of other clones, so that
clones are not mixed. In a wheel it does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# As in pyproject.toml's package-dir; a test compares them.
FOLDERS = {
    "graftwork.ir": "ir",
    "graftwork.frontends": "frontends",
    "graftwork.passes": "passes",
    "graftwork.backends": "backends",
    "graftwork.runtime": "runtime",
    "graftwork.recipe_files": "recipes",
}


class CloneFinder:
    """Finds the parts of the package in a clone."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in FOLDERS:
            return None
        folder = ROOT / FOLDERS[name]
        found = folder / "__init__.py"
        return spec_from_file_location(name, found, submodule_search_locations=[str(folder)])


def install() -> None:
    """Add the finder if this file is in a clone."""
    in_a_wheel = (Path(__file__).parent / "ir").is_dir()
    if not in_a_wheel and CloneFinder not in sys.meta_path:
        sys.meta_path.insert(0, CloneFinder)
