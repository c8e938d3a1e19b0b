"""Finding what registers itself: the files of a package, and what other packages bring."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from types import ModuleType

from .errors import InputError


@cache
def import_all(package: str) -> None:
    """Import every module of a package and of the packages in it: importing registers what each
    defines, so that a new file needs no other edit."""
    folder = importlib.import_module(package)
    for module in pkgutil.walk_packages(folder.__path__, f"{package}."):
        importlib.import_module(module.name)


@cache
def import_brought(group: str) -> None:
    """Import the modules that installed packages name under an entry point group, once. Errors: see
    `brought`."""
    for _ in brought(group):
        pass


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
