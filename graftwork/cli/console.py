"""Consoles: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

# A fixed width for logs and documents.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show the current stage on standard error, if it is a terminal."""
    with err.status("starting") as status:
        yield lambda what: status.update(Text(what))
