"""Discovery of modules that register definitions: files of packages, folders of methods, entry
points of installed packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from .errors import InputError

PASSES = "graftwork.passes"
"""The package of passes, also the entry point group of installed packages' passes."""

OBJECTIVE, LOOP = "objective", "loop"
"""Files of a method's folder that only training imports, and only exports of loops."""

T = TypeVar("T")


@cache
def import_all(package: str) -> None:
    """Import every module of a package, recursively, except those called `OBJECTIVE` or `LOOP`.
    Importing registers definitions, so a new file needs no other edit."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.rpartition(".")[2] not in (OBJECTIVE, LOOP):
            importlib.import_module(module.name)


@cache
def import_passes() -> None:
    """Import every pass of graftwork and of installed packages. Errors: see `brought`."""
    import_all(PASSES)
    for _, module in brought(PASSES):
        if hasattr(module, "__path__"):
            import_all(module.__name__)


@cache
def import_methods(part: str = "") -> None:
    """Import the folders of methods, each with a record and its runtime class: those inside the
    folders of `PASSES` and inside packages named by entry points. part: a file to import as well,
    where it exists. Errors: see `brought`."""
    families = [*_folders(importlib.import_module(PASSES)), *(m for _, m in brought(PASSES))]
    for method in (folder for family in families for folder in _folders(family)):
        if part and find_spec(f"{method.__name__}.{part}"):
            importlib.import_module(f"{method.__name__}.{part}")


def _folders(package: ModuleType) -> list[ModuleType]:
    """Subpackages of a package; none for a module."""
    paths: Sequence[str] = getattr(package, "__path__", ())
    found = pkgutil.iter_modules(paths, f"{package.__name__}.")
    return [importlib.import_module(module.name) for module in found if module.ispkg]


def brought(group: str) -> Iterator[tuple[str, ModuleType]]:
    """Modules of an entry point group with the names of their packages, sorted by name. Errors:
    `InputError` naming the package whose module cannot be imported."""
    for point in sorted(metadata.entry_points(group=group), key=lambda p: (p.name, p.value)):
        owner = point.dist.name if point.dist else "an installed package"
        try:
            module = importlib.import_module(point.module)
        except Exception as error:
            raise InputError(
                f"{owner} names {point.value} as its {group}, which cannot be imported: "
                f"{type(error).__name__}: {error}; mend or uninstall {owner}"
            ) from error
        yield owner, module


@cache
def sources_of(*folders: Path, suffixes: tuple[str, ...] = (".py",)) -> str:
    """A hash of the source files in folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(p for p in folder.rglob("*") if p.suffix in suffixes):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def versions_of(*packages: str) -> dict[str, str]:
    """Versions of those packages that are installed."""
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


class Named(Generic[T]):
    """Registry of entries by name, filled by files of `PASSES` and of installed packages. what: an
    entry, in messages."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.entries: dict[str, tuple[T, str]] = {}

    def add(self, name: str, entry: T, module: str) -> T:
        """Register an entry. Errors: `InputError` if another module has one of this name."""
        _, known = self.entries.setdefault(name, (entry, module))
        if known != module:
            raise InputError(f"{module} and {known} both bring a {self.what} {name!r}: rename one")
        self.entries[name] = entry, module
        return entry

    def find(self, name: str) -> T:
        """The entry of a name. Errors: `InputError` listing the names."""
        import_passes()
        if name not in self.entries:
            known = ", ".join(sorted(self.entries))
            raise InputError(f"no {self.what} is called {name!r}; there are {known}")
        return self.entries[name][0]
