"""The folder in which graftwork keeps what is slow to make: compiled kernels and traces.

It is `$GRAFTWORK_CACHE`, else `$XDG_CACHE_HOME/graftwork`, else `~/.cache/graftwork`. What is kept
there is run or believed, so the folder is used only if nobody but this user and the system's
administrator can write into it or take its name.
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
"""Who else may write."""


def cache_folder() -> Path:
    """Where the folder is, whether it exists or not."""
    named = os.environ.get("GRAFTWORK_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graftwork"


@contextmanager
def kept_folder(what: str) -> Iterator[Path]:
    """The folder; where it cannot be used, a temporary one, with a warning if others may write it.

    what: is kept, for the warning ("compiled kernels").
    """
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
    """Who else could put a library into a folder, in words; None if nobody can.

    The folder itself may be written by its owner alone. In one above it, others may have files of
    their own (it is sticky, such as /tmp), but not take this one's name.
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
    """Whether only a group may write that has this user's name and nobody else in it, as some
    systems give each user."""
    if facts.st_mode & stat.S_IWOTH:
        return False
    with suppress(ImportError, KeyError):
        import grp
        import pwd

        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(facts.st_gid)
        return group.gr_name == user and set(group.gr_mem) <= {user}
    return False


def is_ours(facts: os.stat_result) -> bool:
    """Whether a file is this user's or the administrator's."""
    return facts.st_uid in (os.geteuid(), 0)
