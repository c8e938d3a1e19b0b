"""Reading files that others may have put there: regular ones only, and only so much of them.

Opening a pipe waits for somebody to write into it, and a device may never end. So a file is opened
without waiting, looked at through what was opened, and read up to a limit. Checkpoint folders and
users' own files may be links (caches of downloads are); what lies in an artifact may not.
"""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from .errors import InputError

SMALL = 64 * 2**20
"""Bytes of a manifest, a configuration or an index at most."""

LARGE = 4 * 2**30
"""Bytes of a text, a tokenizer or a list of prompts at most."""

_PIECE = 2**20
"""Bytes that are asked for at a time."""


def open_regular(path: str | Path, *, follow: bool = True) -> BufferedReader:
    """A regular file, open for reading in binary.

    follow: whether it may be a link to one. Errors: `OSError` saying what it is instead.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    if not follow:
        if os.path.islink(path):  # the system's own message speaks of too many links
            raise OSError(f"{path} is not a regular file (links are not followed)")
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(path, flags)
    except ValueError as error:
        raise OSError(f"{os.fspath(path)!r} is no path: {error}") from error
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'not a regular file')}")
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


_KINDS = {
    stat.S_IFDIR: "a folder, not a regular file",
    stat.S_IFIFO: "a pipe, not a regular file",
    stat.S_IFCHR: "a device, not a regular file",
    stat.S_IFBLK: "a device, not a regular file",
    stat.S_IFSOCK: "a socket, not a regular file",
}


def check_regular(path: str | Path, *, follow: bool = True) -> None:
    """For readers that open the path themselves. Errors: as `open_regular`."""
    open_regular(path, follow=follow).close()


def is_regular(path: str | Path) -> bool:
    """Whether the path is a regular file, or a link to one, that can be read."""
    try:
        check_regular(path)
    except (OSError, ValueError):
        return False
    return True


def read_bytes(path: str | Path, limit: int = SMALL, *, follow: bool = True) -> bytes:
    """All of a regular file. Errors: `OSError` if it is none, or holds more than `limit` bytes."""
    pieces: list[bytes] = []
    left = limit
    with open_regular(path, follow=follow) as file:
        while piece := file.read(_PIECE):  # asked for the limit, it would make room for all of it
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise OSError(
                    f"{path} holds more than {limit} bytes, the most that is read of such a file"
                )
    return b"".join(pieces)


def read_text(path: str | Path, limit: int = SMALL, *, follow: bool = True) -> str:
    """A regular file as UTF-8, lines ending in ``\\n``. Errors: as `read_bytes`, and
    `UnicodeDecodeError`."""
    text = read_bytes(path, limit, follow=follow).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path, limit: int = SMALL, *, follow: bool = True) -> Any:
    """A regular file as JSON. Errors: `OSError`, and `ValueError` if it is not JSON."""
    try:
        return json.loads(read_bytes(path, limit, follow=follow))
    except RecursionError as error:
        raise ValueError(f"{path} nests deeper than any file of its kind") from error


def plain_path(what: str, path: str | Path) -> Path:
    """The path, if the system can spell it. Errors: `InputError` naming what it was given for."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"{what}: expected a path, got {path!r}")
    text = os.fspath(path)
    try:
        spelled = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what}: {text!r} is no path: it holds half a character ({error.reason})"
        ) from error
    if b"\0" in spelled:
        raise InputError(f"{what}: {text!r} is no path: it holds a zero byte")
    return Path(path)
