"""Installation commands of optional dependencies."""

from __future__ import annotations

import importlib
import shlex
import sys
from importlib import metadata
from pathlib import Path

from .errors import InputError


def installing(extra: str) -> str:
    """The pip command for an extra: of the running clone, or the extra's packages."""
    pip, clone = [sys.executable, "-m", "pip", "install"], Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file():
        return shlex.join([*pip, "-e", f"{clone}[{extra}]"])
    wanted = [
        text.replace('"', "'").partition(";") for text in metadata.requires("graftwork") or ()
    ]
    names = [name.strip() for name, _, when in wanted if f"extra == {extra!r}" in when]
    return shlex.join([*pip, *names])


def require(package: str, what: str, extra: str, also: str = "") -> None:
    """Import a package, which `what` needs and an extra installs. Errors: `InputError` saying how
    to install it; also: what follows on that."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(
            f"{what} needs the package {package}, which is not installed: {installing(extra)}{also}"
        ) from error
