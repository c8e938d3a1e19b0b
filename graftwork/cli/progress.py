"""Training progress: a bar on a terminal, lines in a log.

A line is printed when the phase changes and every 30 seconds, also during long steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

from rich.console import Console

from ..training import FitState

EVERY = 30.0
"""Maximum seconds between two lines."""

BRIEF = 2.0
"""Minimum seconds between two lines."""


def shown(state: FitState) -> str:
    """Format a state.

    >>> shown(FitState("training", 0.25, 120, 2.5)), shown(FitState("measuring", 1.0, 400))
    ('training step 120 loss 2.500', 'measuring')
    """
    if not state.step or math.isnan(state.loss):
        return state.phase
    return f"{state.phase} step {state.step} loss {state.loss:.3f}"


@contextmanager
def training_progress(
    console: Console, every: float = EVERY
) -> Iterator[Callable[[FitState], None]]:
    """Yield a function that displays states."""
    with _bar(console) if console.is_terminal else _lines(console, every) as update:
        yield update


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[FitState], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("start", total=1.0)

        def update(state: FitState) -> None:
            bar.update(task, completed=state.share, description=shown(state))

        yield update


@contextmanager
def _lines(console: Console, every: float) -> Iterator[Callable[[FitState], None]]:
    lines = _Lines(console, every)
    over = Event()

    def watch() -> None:
        while not over.wait(lines.left()):
            lines.update(lines.state)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lines.update
    finally:
        over.set()
        thread.join()


class _Lines:
    """Prints the last reported state."""

    def __init__(self, console: Console, every: float) -> None:
        self.console, self.every, self.lock = console, every, Lock()
        self.state = FitState("starting", 0.0)
        self.began = self.printed = time.monotonic()

    def update(self, state: FitState) -> None:
        """Report a state."""
        changed = state.phase != self.state.phase
        self.state = state
        # Phases can be milliseconds apart.
        if self.left() <= (self.every - BRIEF if changed else 0):
            self.print()

    def left(self) -> float:
        """Seconds until the next line."""
        return max(0.0, self.printed + self.every - time.monotonic())

    def print(self) -> None:
        """Print a line."""
        with self.lock:
            self.printed = time.monotonic()
            passed = self.printed - self.began
            text = f"{shown(self.state)}, {self.state.share:.0%}, {passed:.0f} s"
            self.console.print(text, soft_wrap=True, markup=False)
