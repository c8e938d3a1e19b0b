"""A file of prompts cut into shards, and the folder that holds what is done of them.

A shard is written whole or not at all, under its number, so a job that was stopped goes on with
those that are missing. The folder says what it is of: other prompts, or other options, are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..ir import InputError
from ..ir.support.files import plain_path, read_json, writing
from ..ir.support.names import shown
from ..ir.support.scratch import write_text

ABOUT = "map.json"
KINDS = {"text": str, "ids": list, "messages": list}
"""What a line may hold, of which one."""

MOST_LINE = 2**24
"""Bytes of a line."""


class Shard(NamedTuple):
    """Lines of the file. start, stop: in bytes. line: the first one's number, from 1."""

    number: int
    start: int
    stop: int
    line: int


class Line(NamedTuple):
    """number: in the file, from 1. kind: see `KINDS`."""

    number: int
    kind: str
    value: Any


@dataclass(frozen=True)
class Job:
    """prompts: the file. out: the folder. shards: all of them. lines: with a prompt."""

    prompts: Path
    out: Path
    shards: list[Shard]
    lines: int

    def path(self, number: int) -> Path:
        """Where a shard's answers stand once it is done."""
        return self.out / f"part-{number:06d}.jsonl"

    @property
    def missing(self) -> list[Shard]:
        """What is still to be done."""
        return [shard for shard in self.shards if not self.path(shard.number).exists()]


def begin(prompts: str | Path, out: str | Path, size: int, asked: Mapping[str, Any]) -> Job:
    """Read a file of prompts, a line each, and begin or go on with a folder. size: prompts of a
    shard. asked: what makes the answers what they are. Errors: `InputError` with the line that is
    no prompt, and for a folder of another job."""
    path, folder = plain_path("prompts", prompts), plain_path("--out", out)
    shards, lines, digest = _cut(path, size)
    if not lines:
        raise InputError(f"{path}: expected a prompt a line, and there is none")
    about = {"prompts": digest, "shard": size, **asked}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _check(folder, json.loads(json.dumps(about)))
    return Job(path, folder, shards, lines)


def _check(folder: Path, about: Mapping[str, Any]) -> None:
    """Errors: `InputError` for a folder that holds something else."""
    path = folder / ABOUT
    if not path.exists():
        if any(folder.iterdir()):
            raise InputError(
                f"--out {folder}: expected a new folder, or one that this command began; it holds "
                f"other files"
            )
        write_text(path, json.dumps(about, indent=1) + "\n")
        return
    try:
        held = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    held = held if isinstance(held, dict) else {}
    if other := sorted(n for n in {*held, *about} if held.get(n) != about.get(n)):
        raise InputError(
            f"--out {folder} was begun with another {', '.join(other)} "
            f"({path} has what it was): take another folder"
        )


def _cut(path: Path, size: int) -> tuple[list[Shard], int, str]:
    """Shards, prompts, and the SHA-256 of a file, each line of which is checked."""
    shards, digest, begun = list[Shard](), hashlib.sha256(), (0, 1)
    place, count, number = 0, 0, 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MOST_LINE + 1):
                number += 1
                if len(line) > MOST_LINE:
                    raise InputError(f"{path}:{number}: a line of more than {MOST_LINE} bytes")
                digest.update(line)
                place += len(line)
                count += _parsed(path, number, line) is not None
                if count == size * (len(shards) + 1):
                    shards.append(Shard(len(shards), begun[0], place, begun[1]))
                    begun = place, number + 1
    except OSError as error:
        raise InputError(f"prompts: cannot read {path}: {error}") from error
    if count > size * len(shards):
        shards.append(Shard(len(shards), begun[0], place, begun[1]))
    return shards, count, digest.hexdigest()


def lines_of(path: Path, shard: Shard) -> list[Line]:
    """A shard's prompts."""
    with path.open("rb") as file:
        file.seek(shard.start)
        rows = file.read(shard.stop - shard.start).split(b"\n")
    found = [_parsed(path, number, row) for number, row in enumerate(rows, shard.line)]
    return [line for line in found if line is not None]


def _parsed(path: Path, number: int, row: bytes) -> Line | None:
    """A line; None for an empty one. Errors: `InputError` naming it."""
    where = f"{path}:{number}"
    try:
        text = row.decode()
        if path.suffix != ".jsonl":
            text = text.rstrip("\r\n")
            return Line(number, "text", text) if text.strip() else None
        entry = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected JSON in UTF-8: {error}") from error
    if entry is None and not text.strip():
        return None
    for kind, type_ in KINDS.items():
        if isinstance(entry, dict) and isinstance(entry.get(kind), type_) and entry[kind]:
            return Line(number, kind, entry[kind])
    raise InputError(
        f'{where}: expected {{"text": "..."}}, {{"ids": [...]}} or {{"messages": [...]}}, got '
        f"{shown(entry)}"
    )
