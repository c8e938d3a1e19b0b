"""Entries of the cache: a folder a key, checked on reading, bounded in size."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..ir.support.cache_folder import kept_folder
from ..ir.support.scratch import replacing

MOST = 4 << 30
"""Bytes of all entries at most; the least recently used go first."""

SPARE = 4
"""An entry is kept where the disk has this many times its size to spare."""

INDEX = "ready.json"
_ROOM = "ready"


@contextlib.contextmanager
def entry(key: str) -> Iterator[Path]:
    """The folder of a key, which need not exist."""
    with kept_folder("ready steps") as folder:
        yield folder / _ROOM / key


def read(folder: Path) -> dict[str, Any] | None:
    """What `write` was given as `about`, if every file is as it was written; None otherwise."""
    try:
        sealed, _, text = (folder / INDEX).read_text().partition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != sealed:
            return None
        index = json.loads(text)
        os.utime(folder)
        if any(_sum(folder / name) != known for name, known in index["files"].items()):
            return None
    except (OSError, ValueError):
        return None
    about: dict[str, Any] = index["about"]
    return about


def write(folder: Path, size: int, fill: Callable[[Path], None], about: Mapping[str, Any]) -> None:
    """Keep the files that `fill` writes into a new folder, about `size` bytes, where there is room.
    Errors: `OSError`, `InputError`."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if size > MOST or size * SPARE > shutil.disk_usage(folder.parent).free:
        return
    with replacing(folder) as new:
        fill(new)
        sums = {path.name: _sum(path) for path in new.iterdir()}
        text = json.dumps({"files": sums, "about": dict(about)})
        seal = hashlib.sha256(text.encode()).hexdigest()
        (new / INDEX).write_text(f"{seal}\n{text}")
    _make_room(folder.parent)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_room(room: Path) -> None:
    """Remove the least recently used entries beyond `MOST` bytes."""
    found = [path for path in room.iterdir() if (path / INDEX).is_file()]
    total = 0
    for path in sorted(found, key=lambda path: -path.stat().st_mtime):
        total += sum(file.stat().st_size for file in path.iterdir())
        if total > MOST:
            shutil.rmtree(path, ignore_errors=True)
