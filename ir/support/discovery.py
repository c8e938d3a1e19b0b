"""Finding what registers itself: files of a package, folders of methods, what packages bring."""

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

PASSES, OBJECTIVE = "graftwork.passes", "objective"
"""The package of passes, which is also the entry point group of those that packages bring; and the
file of a method's folder that training alone imports."""

T = TypeVar("T")


@cache
def import_all(package: str) -> None:
    """Import every module of a package and of the packages in it, but those called `OBJECTIVE`:
    importing registers what each defines, so that a new file needs no other edit."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.rpartition(".")[2] != OBJECTIVE:
            importlib.import_module(module.name)


@cache
def import_passes() -> None:
    """Import every pass: graftwork's, and those of the modules and packages that other packages
    name. Errors: see `brought`."""
    import_all(PASSES)
    for _, module in brought(PASSES):
        if hasattr(module, "__path__"):
            import_all(module.__name__)


@cache
def import_methods(part: str = "") -> None:
    """Import the folders of methods: a record each, and the class that carries it out. They are the
    folders in those of `PASSES`, and in the packages that other packages name.

    part: a file of theirs that is imported, too, where there is one. Errors: see `brought`.
    """
    families = [*_folders(importlib.import_module(PASSES)), *(m for _, m in brought(PASSES))]
    for method in (folder for family in families for folder in _folders(family)):
        if part and find_spec(f"{method.__name__}.{part}"):
            importlib.import_module(f"{method.__name__}.{part}")


def _folders(package: ModuleType) -> list[ModuleType]:
    """The packages in a package; none in a module."""
    paths: Sequence[str] = getattr(package, "__path__", ())
    found = pkgutil.iter_modules(paths, f"{package.__name__}.")
    return [importlib.import_module(module.name) for module in found if module.ispkg]


def brought(group: str) -> Iterator[tuple[str, ModuleType]]:
    """The modules that installed packages name under an entry point group, and who names them.

    The order is that of their names. Errors: `InputError` naming the package whose module cannot be
    imported.
    """
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
def sources_of(*folders: Path) -> str:
    """A hash of the Python files in folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
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
    """Entries by name, which files of `PASSES` and installed packages register. what: one of them,
    in messages."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.entries: dict[str, tuple[T, str]] = {}

    def add(self, name: str, entry: T, module: str) -> T:
        """Register an entry. Errors: `InputError` if another module has one of that name."""
        _, known = self.entries.setdefault(name, (entry, module))
        if known != module:
            raise InputError(f"{module} and {known} both bring a {self.what} {name!r}: rename one")
        self.entries[name] = entry, module
        return entry

    def find(self, name: str) -> T:
        """The entry of a name. Errors: `InputError` naming those there are."""
        import_passes()
        if name not in self.entries:
            known = ", ".join(sorted(self.entries))
            raise InputError(f"no {self.what} is called {name!r}; there are {known}")
        return self.entries[name][0]
