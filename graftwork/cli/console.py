"""Where commands print: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

# Where output is not a terminal it is read by people all the same, in a log or a document.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line on standard error that names the current stage; nothing where it is no terminal."""
    with err.status("starting") as status:
        yield lambda what: status.update(Text(what))
