"""Reading files that others may have put there: regular ones only, and only so much of them.

Opening a pipe waits for somebody to write into it, and a device may never end. So a file is opened
without waiting, looked at through what was opened, and read up to a limit. Checkpoint folders and
users' own files may be links (caches of downloads are); what lies in an artifact may not.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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


class SealedPath(type(Path())):  # type: ignore[misc]
    """The path of a file that must be what it was, which `read_bytes` checks. sha256: in hex."""

    sha256 = ""

    @classmethod
    def of(cls, path: Path, sha256: str) -> SealedPath:
        """A path and what the file there must be."""
        sealed = cls(path)
        sealed.sha256 = sha256
        return sealed


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


def check_replaceable(path: Path) -> None:
    """That a file may be written to a path: nothing is there, or a regular file.

    Errors: `InputError` saying what is there instead.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # whoever writes is told what is wrong
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a link, not a regular file")
        raise InputError(f"cannot write {path}: it is {kind}; choose another path, or remove it")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors: `InputError` naming `path` where the system, or safetensors, refuses what is done
    within: no space, no right, no such folder."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {error}") from error


def is_regular(path: str | Path) -> bool:
    """Whether the path is a regular file, or a link to one, that can be read."""
    try:
        check_regular(path)
    except (OSError, ValueError):
        return False
    return True


def read_bytes(path: str | Path, limit: int = SMALL, *, follow: bool = True) -> bytes:
    """All of a regular file. Errors: `OSError` if it is none, holds more than `limit` bytes, or is
    not what a `SealedPath` says."""
    with open_regular(path, follow=follow) as file:
        data = read_open(file, limit)
    sha256 = getattr(path, "sha256", "")
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise OSError(
            f"{path} is not what it was when the model was loaded: the artifact was changed or "
            f"saved over; load it again"
        )
    return data


def read_open(file: BufferedReader, limit: int = SMALL) -> bytes:
    """The rest of an open file. Errors: `OSError` for more than `limit` bytes."""
    pieces: list[bytes] = []
    left = limit
    while piece := file.read(_PIECE):  # asked for the limit, it would make room for all of it
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise OSError(
                f"{file.name} holds more than {limit} bytes, the most that is read of such a file"
            )
    return b"".join(pieces)


def read_text(path: str | Path, limit: int = SMALL, *, follow: bool = True) -> str:
    """A regular file as UTF-8, lines ending in ``\\n``. Errors: as `read_bytes`, and
    `UnicodeDecodeError`."""
    return as_text(read_bytes(path, limit, follow=follow))


def as_text(data: bytes) -> str:
    """UTF-8 as text, lines ending in ``\\n``. Errors: `UnicodeDecodeError`."""
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path, limit: int = SMALL, *, follow: bool = True) -> Any:
    """A regular file as JSON. Errors: `OSError`, and `ValueError` if it is not JSON."""
    try:
        return json.loads(read_bytes(path, limit, follow=follow))
    except RecursionError as error:
        raise ValueError(f"{path} nests deeper than any file of its kind") from error


def plain_path(what: str, path: str | Path) -> Path:
    """The path, if there is one that the system can spell. Errors: `InputError` naming `what`."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"{what}: expected a path, got {path!r}")
    text = os.fspath(path)
    if not text:
        raise InputError(f"{what}: expected a path, got an empty one (. is the working folder)")
    try:
        spelled = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what}: {text!r} is no path: it holds half a character ({error.reason})"
        ) from error
    if b"\0" in spelled:
        raise InputError(f"{what}: {text!r} is no path: it holds a zero byte")
    return Path(path)
