"""Temporary folders, and atomic replacement of files and folders.

A process locks its temporary folders. Creating one first removes unlocked ones beside it, which
killed processes left: only folders with names of this module (16 random digits and a suffix) that
belong to the user; links are not followed. Without file locks nothing is removed.
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
    """A temporary folder, removed with the object, at exit, or, after a kill, when the next one is
    created. Errors: `OSError`."""

    def __init__(self, parent: Path | None = None) -> None:
        place = parent or Path(tempfile.gettempdir())
        sweep(place)
        self.path, lock = _held(place, "graftwork-{}.scratch", mode=0o700)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder now."""
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process does not own the folder
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder that atomically replaces `folder` when the block succeeds, and is removed
    when it fails. Errors: `InputError` for errors of the system or safetensors; `folder` is then
    unchanged."""
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
    """Yield a path for a file that atomically replaces `path` when the block succeeds, and is
    removed when it fails. Errors: `InputError` for errors of the system or safetensors, and if
    `path` is a link, a pipe, a device or a folder."""
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
    """Write a text file atomically. Links are followed; pipes and devices are written directly.
    Errors: `InputError`."""
    with writing(path):
        path = path.resolve()
        if path.exists() and not is_regular(path):
            path.write_text(text, encoding="utf-8")
            return
    with replacing_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _take_place(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; an old folder is then at `new`."""
    if not folder.exists():
        new.rename(folder)
    elif not exchange(new, folder):
        _take_place_in_two(new, folder)


def _take_place_in_two(new: Path, folder: Path) -> None:
    """Replace without an atomic exchange; after a crash, `sweep` restores the old folder."""
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
    """Exchange two paths atomically; False if the system does not support it. Errors: `OSError`."""
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
    """Remove folders in `parent` that killed processes of this user left."""
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
    """A new folder and the handle of its lock."""
    while True:
        path = parent / pattern.format(secrets.token_hex(8))
        path.mkdir(mode=mode)
        # Another process may sweep the folder before it is locked.
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
    """Lock an open file or folder until the handle is closed; False if that fails. wait: for other
    holders."""
    if not _LOCKS:
        return False
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """fsync the folder's entries."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
