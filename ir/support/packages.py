"""Installation commands of optional dependencies."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path


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
