"""Folders that a process works in, and folders that take another's place as a whole.

A killed process cleans nothing up. So whoever works in a folder holds a lock on it as long as it
lives, and whoever makes the next one beside it first removes those that nobody holds. Only folders
with the names given here count (an ending and 16 random digits), only the user's own, and links are
not followed. Where the file system has no locks, nothing is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from .files import check_replaceable, is_regular, writing

try:
    import fcntl
except ImportError:  # not a POSIX system
    _LOCKS = False
else:
    _LOCKS = True

_OURS = re.compile(
    r"graftwork-[0-9a-f]{16}\.scratch|\.(?P<beside>.+)\.[0-9a-f]{16}\.(?P<kind>partial|old)"
)


class Scratch:
    """A temporary folder that goes with the object, or with the process, or when the next one is
    made after the process was killed.

    path: of the folder. Errors: `OSError` if there is no room.
    """

    def __init__(self, parent: Path | None = None) -> None:
        place = parent or Path(tempfile.gettempdir())
        sweep(place)
        self.path, lock = _held(place, "graftwork-{}.scratch", mode=0o700)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder now."""
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the object, but not the folder
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes `folder`'s place when the block ends well.

    Whoever looks sees the old folder, the new one, or none if there was none. What the block wrote
    is gone if it fails. Errors: `InputError` naming `folder` if the system or safetensors refuses;
    it is then as it was.
    """
    parent = folder.parent
    with writing(folder):
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        new, lock = _held(parent, f".{folder.name}.{{}}.partial", mode=0o777)
        try:
            yield new
            _sync(new)
            _take_place(new, folder)
            _sync(parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file to, which takes its place when the block ends well.

    Whoever looks sees the old file, the new one, or none. What the block wrote is gone if it fails.
    Errors: `InputError` naming `path` if the system or safetensors refuses, or for a link, a pipe,
    a device or a folder, whose place no file takes.
    """
    check_replaceable(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with writing(path):
        try:
            yield part
            with part.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file, whole or as it was; links are followed, and pipes and devices take it as it is.

    Errors: `InputError` naming the path if the system refuses.
    """
    with writing(path):
        path = path.resolve()
        if path.exists() and not is_regular(path):
            path.write_text(text, encoding="utf-8")
            return
    with replacing_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _take_place(new: Path, folder: Path) -> None:
    """`folder` is now what `new` was; what it was, if anything, is then at `new`."""
    if not folder.exists():
        new.rename(folder)
    elif not exchange(new, folder):
        _take_place_in_two(new, folder)


def _take_place_in_two(new: Path, folder: Path) -> None:
    """Where two names cannot be exchanged. If it is cut short, `sweep` puts the old one back."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        lock_open(lock, shared=True)
        old = folder.parent / f".{folder.name}.{secrets.token_hex(8)}.old"
        folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(lock)


def exchange(one: Path, other: Path) -> bool:
    """Swap what two names mean, in one step; False where the system cannot.

    Errors: `OSError` if it can and refuses.
    """
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def sweep(parent: Path) -> None:
    """Remove folders that killed processes of this user left in `parent`."""
    if not _LOCKS:
        return
    try:
        names = [name for name in os.listdir(parent) if _OURS.fullmatch(name)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            _sweep(parent / name)


def _sweep(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.getuid() or not lock_open(handle, wait=False):
            return
        found = _OURS.fullmatch(path.name)
        assert found is not None
        lost = found["kind"] == "old" and not (path.parent / found["beside"]).exists()
        if lost:
            path.rename(path.parent / found["beside"])
        else:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def _held(parent: Path, pattern: str, mode: int) -> tuple[Path, int]:
    """A new folder, and the open handle that holds its lock."""
    while True:
        path = parent / pattern.format(secrets.token_hex(8))
        path.mkdir(mode=mode)
        # Somebody who sweeps may come between making and locking, and take it for a leftover.
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        lock_open(handle, shared=True)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.lstat(path)):
                return path, handle
        os.close(handle)


def lock_open(handle: int, *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file or folder for as long as the handle is open; False if that cannot be had.

    Several may have a shared lock. wait: for those who have it now.
    """
    if not _LOCKS:
        return False
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Make the folder's entries last."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
