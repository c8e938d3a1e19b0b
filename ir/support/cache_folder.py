"""The user's cache folder, for compiled kernels and traces.

It is `$GRAFTWORK_CACHE`, else `$XDG_CACHE_HOME/graftwork`, else `~/.cache/graftwork`. Its files are
executed or trusted, so it is used only if no user but its owner and root can write or rename it.
"""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import GraftworkWarning

OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""Write permission for group and others."""


def cache_folder() -> Path:
    """The folder's path; it need not exist."""
    named = os.environ.get("GRAFTWORK_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graftwork"


@contextmanager
def kept_folder(what: str) -> Iterator[Path]:
    """The folder, or a temporary one if it cannot be used, with a warning if other users can write
    to it. what: its contents, for the warning ("compiled kernels")."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable, reason = os.access(folder, os.W_OK), _why_unsafe(folder)
    except OSError:
        usable, reason = False, None
    if usable and reason is None:
        yield folder.resolve()
        return
    if reason is not None:
        warnings.warn(
            f"{reason}, so {what} are not kept in {folder} and each process makes its own; make it "
            "yours (chown, chmod go-w), or set GRAFTWORK_CACHE",
            GraftworkWarning,
            stacklevel=2,
        )
    with tempfile.TemporaryDirectory() as other:
        yield Path(other)


def _why_unsafe(folder: Path) -> str | None:
    """Why other users could replace a folder's files; None if they cannot.

    Only the owner may write to the folder itself. Folders above may be writable if they are sticky
    (such as /tmp), so that others cannot rename this one.
    """
    if folder.is_symlink():
        return f"{folder} is a link"
    first = folder.resolve()
    for place in (first, *first.parents):
        facts = place.stat()
        shared = facts.st_mode & OTHERS and not (place != first and facts.st_mode & stat.S_ISVTX)
        if not is_ours(facts):
            return f"{place} belongs to another user"
        if shared and not (place != first and _is_own_group(facts)):
            return f"{place} can be written by other users"
    return None


def _is_own_group(facts: os.stat_result) -> bool:
    """Whether only the user's private group may write: it has the user's name and no other
    member."""
    if facts.st_mode & stat.S_IWOTH:
        return False
    with suppress(ImportError, KeyError):
        import grp
        import pwd

        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(facts.st_gid)
        return group.gr_name == user and set(group.gr_mem) <= {user}
    return False


def is_ours(facts: os.stat_result) -> bool:
    """Whether a file is owned by this user or root."""
    return facts.st_uid in (os.geteuid(), 0)
