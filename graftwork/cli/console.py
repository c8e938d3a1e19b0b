"""Consoles: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

from rich.console import Console
from rich.text import Text

# A fixed width for logs and documents.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)

EVERY = 30.0
"""Maximum seconds between two lines of a log."""

BRIEF = 2.0
"""Seconds that a stage takes before a log names it."""


@contextmanager
def progress(console: Console = err, brief: float = BRIEF) -> Iterator[Callable[[str], None]]:
    """Show the current stage on standard error: beside a spinner on a terminal, by `lines` in a
    log. brief: see `lines`."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda what: status.update(Text(what))
    else:
        with lines(console, EVERY, brief) as update:
            yield lambda what: update(what, what)


@contextmanager
def lines(console: Console, every: float, brief: float) -> Iterator[Callable[[str, str], None]]:
    """Yield a function of a stage and what is to be said of it, with which a log has a line for
    each stage that lasts `brief` seconds, and one each `every` seconds, also during long steps."""
    log, over = _Log(console, every, brief), Event()

    def watch() -> None:
        while not over.wait(min(brief, every) / 4):
            log.print_due()

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield log.update
    finally:
        over.set()
        thread.join()


class _Log:
    """Prints what is said of a stage when a line is due."""

    def __init__(self, console: Console, every: float, brief: float) -> None:
        self.console, self.every, self.brief, self.lock = console, every, brief, Lock()
        self.began = time.monotonic()
        self.stage = self.text = ""
        self.due = self.began + every

    def update(self, stage: str, text: str) -> None:
        """Say something of a stage."""
        with self.lock:
            if stage != self.stage:
                self.due = time.monotonic() + self.brief
            self.stage, self.text = stage, text

    def print_due(self) -> None:
        """Print a line if it is time."""
        with self.lock:
            now = time.monotonic()
            if now < self.due or not self.text:
                return
            self.due = now + self.every
            line = f"{self.text}, {now - self.began:.0f} s"
        self.console.print(line, soft_wrap=True, markup=False)
