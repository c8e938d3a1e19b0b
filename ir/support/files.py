"""Reading of untrusted files: regular files only, up to a size limit.

Opening a pipe may block and a device may be endless. So files are opened without blocking, checked
through the open handle, and read up to a limit. Links are followed, except in artifacts.
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
"""Maximum bytes of a manifest, a configuration or an index."""

LARGE = 4 * 2**30
"""Maximum bytes of a text, a tokenizer or a list of prompts."""

_PIECE = 2**20
"""Bytes per read."""


class SealedPath(type(Path())):  # type: ignore[misc]
    """A path with the expected sha256 (hex) of its file, which `read_bytes` checks."""

    sha256 = ""

    @classmethod
    def of(cls, path: Path, sha256: str) -> SealedPath:
        """A path with a hash."""
        sealed = cls(path)
        sealed.sha256 = sha256
        return sealed


def open_regular(path: str | Path, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for binary reading. follow: whether it may be a link. Errors: `OSError`
    naming the kind of other files."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    if not follow:
        if os.path.islink(path):  # the system's message would be "too many links"
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


def check_regular(path: str | Path) -> None:
    """Check for readers that open the path themselves. Errors: as `open_regular`."""
    open_regular(path).close()


def check_replaceable(path: Path) -> None:
    """Errors: `InputError` if the path exists and is not a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # writing reports the error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a link, not a regular file")
        raise InputError(f"cannot write {path}: it is {kind}; choose another path, or remove it")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn `OSError` and errors of safetensors in the block into an `InputError` naming `path`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {error}") from error


def is_regular(path: str | Path) -> bool:
    """Whether the path is a readable regular file, or a link to one."""
    try:
        check_regular(path)
    except (OSError, ValueError):
        return False
    return True


def read_bytes(path: str | Path, limit: int = SMALL, *, follow: bool = True) -> bytes:
    """A regular file's contents. Errors: `OSError` if it is not regular, has more than `limit`
    bytes, or not the hash of a `SealedPath`."""
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
    while piece := file.read(_PIECE):  # read(limit) would allocate it
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise OSError(
                f"{file.name} holds more than {limit} bytes, the most that is read of such a file"
            )
    return b"".join(pieces)


def read_text(path: str | Path, limit: int = SMALL) -> str:
    """A regular file as UTF-8, lines ending in ``\\n``. Errors: as `read_bytes`, and
    `UnicodeDecodeError`."""
    return as_text(read_bytes(path, limit))


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
    """A valid, nonempty path. Errors: `InputError` naming `what`."""
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


def stamp_of(stat: os.stat_result) -> tuple[int, ...]:
    """Identity of a file's contents: device, inode, times and size."""
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size
